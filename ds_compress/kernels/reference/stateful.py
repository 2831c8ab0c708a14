"""Quantization of messages that follow a state of a feedback, one call per message and side.

A state is kept as it is, one tensor, or as int8 codes and their scales (`encode_int8`); it has the shape of
the groups, [n, G], whose dtype is float32 or bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.numerics import as_divisor, rows_finite
from ds_compress.kernels.reference import groups as plain
from ds_compress.kernels.reference.feedback import (
    GROUP,
    changed,
    decode_int8,
    encode_int8,
    grouped,
    moved,
)


class Following:
    """The same steps whoever quantizes.

    What of a group is not finite, its values or the next state, is a matter of that group: it keeps its
    state.
    """

    def __init__(self, by: Any):
        """`by`: has the `quantize`, `dequantize` and `quantize_with_error` of reference/groups.py."""
        self._by = by

    def quantize_with_residual(
        self,
        groups: Tensor,
        residual: tuple[Tensor, ...],
        scale: float,
        share: float,
        rest: float,
        grid: Grid,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`quantize` of groups + scale * residual in the dtype of `groups`, and the residual of the next
        message: share * residual + rest * lost / scale, where that sum loses `lost`.

        Args:
            residual: finite. Left out of a group that is not. May be written to.
            share: at most 1, as `rest`.
            out: see `quantize`.

        Returns:
            what `quantize` returns; the next residual, kept as `residual` is.
        """
        held = values_of(residual)
        parts, lost = self._by.quantize_with_error(groups, held, scale, grid, out)
        return parts, chosen(residual, renewed(held, lost, scale, share, rest))

    def quantize_change(
        self,
        groups: Tensor,
        state: Tensor,
        scale: float,
        grid: Grid,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """`quantize` of groups - scale * state in the dtype of `groups`, and the state of the next message,
        fp32: that to which `dequantize_change` comes.

        Args:
            state: fp32, finite. May be written to.
            out: see `quantize`.
        """
        parts = self._by.quantize(changed(groups, state, scale), grid, None, out)
        return parts, self._advanced(parts, state, scale, grid, groups.dtype)[1]

    def dequantize_change(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The values, [n, G] of `dtype`, whose change `quantize_change` gave as `parts`: scale times the
        state of the next message, or what is not finite; and that state, which is fp32. `state` may be
        written to."""
        new, kept = self._advanced(parts, state, scale, grid, dtype)
        return (new * scale).to(dtype), kept

    def _advanced(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What `state` would be next, and what it is."""
        new = moved(state, self._by.dequantize(parts, grid, dtype), scale)
        return new, chosen((state,), new)[0]


def chosen(old: tuple[Tensor, ...], new: Tensor) -> tuple[Tensor, ...]:
    """Of groups whose values in `new`, fp32, are finite those, kept as `old` is; of others what `old` has. A
    code shares its scale with those of other groups, which keep theirs with it."""
    if len(old) == 1:
        kept = new.to(old[0].dtype)
        return (torch.where(rows_finite(kept), kept, old[0]),)
    lost = grouped(~rows_finite(new).expand(new.shape)).amax(1) > 0  # as the scales
    codes, scales = encode_int8(new)
    of_codes = lost[:, None].expand(-1, GROUP).flatten()[: codes.numel()].view(codes.shape)
    return torch.where(of_codes, old[0], codes), torch.where(lost, old[1], scales)


def values_of(state: Sequence[Tensor]) -> Tensor:
    """fp32: what is kept in `state`."""
    return decode_int8(*state) if len(state) == 2 else state[0].float()


def renewed(residual: Tensor, lost: Tensor, scale: float, share: float, rest: float) -> Tensor:
    """share * residual + rest * lost / scale; a share of 0 leaves the first out, a scale or a rest of 1
    nothing to do."""
    lost = lost if scale == 1 else lost / as_divisor(scale, lost)
    lost = lost if rest == 1 else rest * lost
    return share * residual + lost if share else lost


_following = Following(plain)
quantize_with_residual = _following.quantize_with_residual
quantize_change = _following.quantize_change
dequantize_change = _following.dequantize_change
