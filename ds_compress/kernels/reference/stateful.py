"""Quantization of messages that follow a state of a feedback, one call per message and side.

A state is kept as it is, one tensor, or as int8 codes and their scales (`encode_int8`); it has the shape of
the groups, [n, G], whose dtype is float32 or bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.numerics import as_divisor, is_finite
from ds_compress.kernels.reference import groups as plain
from ds_compress.kernels.reference.feedback import advanced, changed, decode_int8, encode_int8


class Following:
    """The same steps whoever quantizes."""

    def __init__(self, by: Any):
        """`by`: has the `quantize`, `dequantize` and `quantize_with_error` of reference/groups.py."""
        self._by = by

    def quantize_with_residual(
        self,
        groups: Tensor,
        residual: Sequence[Tensor],
        scale: float,
        share: float,
        rest: float,
        grid: Grid,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """`quantize` of groups + scale * residual in the dtype of `groups`, and the residual of the next
        message: share * residual + rest * lost / scale, where that sum loses `lost`.

        Args:
            residual: finite. Left out where `groups` are not finite.
            out: see `quantize`.

        Returns:
            what `quantize` returns; the next residual, kept as `residual` is; whether `groups` and the next
            residual are finite, a bool of one element.
        """
        held, finite = values_of(residual), is_finite(groups)
        parts, lost = self._by.quantize_with_error(groups, held, finite.float() * scale, grid, out)
        new = renewed(held, lost, scale, share, rest)
        return parts, kept_as(residual, new), finite & is_finite(new)

    def quantize_change(
        self,
        groups: Tensor,
        state: Tensor,
        scale: float,
        grid: Grid,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """`quantize` of groups - scale * state in the dtype of `groups`, and the state of the next message,
        fp32: that to which `dequantize_change` comes; whether it is finite, a bool of one element. `out`: see
        `quantize`."""
        parts = self._by.quantize(changed(groups, state, scale), grid, None, out)
        return parts, *advanced(state, self._by.dequantize(parts, grid, groups.dtype), scale)

    def dequantize_change(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The values, [n, G] of `dtype`, whose change `quantize_change` gave as `parts`: scale times the
        state of the next message, which is fp32; that state; and whether it is finite, a bool of one
        element."""
        new, finite = advanced(state, self._by.dequantize(parts, grid, dtype), scale)
        return (new * scale).to(dtype), new, finite


def values_of(state: Sequence[Tensor]) -> Tensor:
    """fp32: what is kept in `state`."""
    return decode_int8(*state) if len(state) == 2 else state[0].float()


def kept_as(state: Sequence[Tensor], values: Tensor) -> tuple[Tensor, ...]:
    """`values`, fp32, kept as `state` is."""
    return encode_int8(values) if len(state) == 2 else (values.to(state[0].dtype),)


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
