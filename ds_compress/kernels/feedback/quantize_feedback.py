"""Quantization of messages that follow a state of a feedback, one call per message and side.

Values, float32 or bfloat16, lie in groups; a state has their shape, and is kept in float32, in bfloat16, or
as int8 codes and their scales (`encode_int8`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.feedback import reference as feedback
from ds_compress.kernels.feedback.reference import GROUP, blended, grouped
from ds_compress.kernels.numerics import rows_finite
from ds_compress.kernels.quantize import reference as groups
from ds_compress.kernels.quantize.grid import Grid


class Following:
    """The same steps whoever quantizes.

    What of a group is not finite, its values or the next state, is a matter of that group: it keeps its
    state.
    """

    def __init__(self, by: Any, passes: Any):
        """`by`: has the functions of reference/groups.py, `passes` those of reference/feedback.py."""
        self._by, self._passes = by, passes

    def quantize_with_residual(
        self,
        values: Tensor,
        residual: tuple[Tensor, ...],
        scale: float,
        share: float,
        rest: float,
        grid: Grid,
        size: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`quantize` of values + scale * residual in the dtype of `values`, and the residual of the next
        message: share * residual + rest * lost / scale, where that sum loses `lost`.

        Args:
            residual: finite. Left out of a group that is not. May be written to.
            share: at most 1, as `rest`.
            size: of the groups, of which there is a whole number.
            out: see `quantize`.

        Returns:
            what `quantize` returns; the next residual, kept as `residual` is.
        """
        kept = self._passes.decode_int8(*residual) if len(residual) == 2 else residual[0].float()
        held = kept.reshape(-1, size)
        parts, lost = self._by.quantize_with_error(values.reshape(-1, size), held, scale, grid, out)
        return parts, self._chosen(residual, blended(held, lost, scale, share, rest))

    def quantize_change(
        self,
        values: Tensor,
        state: Tensor,
        scale: float,
        grid: Grid,
        size: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """`quantize` of values - scale * state in the dtype of `values`, and the state of the next message:
        that to which `dequantize_change` comes.

        Args:
            state: finite. May be written to.
            size, out: see `quantize_with_residual`.
        """
        change = self._passes.changed(values, state.float(), scale).reshape(-1, size)
        parts = self._by.quantize(change, grid, None, out)
        return parts, self._advanced(parts, state, scale, grid, values.dtype)[1]

    def dequantize_change(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The values, of `dtype` and state's shape, whose change `quantize_change` gave as `parts`: scale
        times the state of the next message in fp32, or what is not finite; and that state. `state` may be
        written to."""
        new, kept = self._advanced(parts, state, scale, grid, dtype)
        return (new * scale).to(dtype).view(state.shape), kept

    def _advanced(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What `state` would be next, fp32 [n, G], and what it is."""
        change = self._by.dequantize(parts, grid, dtype)
        new = self._passes.moved(state.float().reshape(change.shape), change, scale)
        return new, self._chosen((state,), new)[0]

    def _chosen(self, old: tuple[Tensor, ...], new: Tensor) -> tuple[Tensor, ...]:
        """Of groups whose values in `new`, fp32 [n, G], can be kept as `old` is those; of others what `old`
        has. A code shares its scale with those of other groups, which keep theirs with it."""
        if len(old) == 1:
            kept = new.bfloat16() if old[0].dtype == torch.bfloat16 else new
            before = old[0].reshape(new.shape).to(kept.dtype)
            return (torch.where(rows_finite(kept), kept, before).view(old[0].shape),)
        lost = grouped(~rows_finite(new).expand(new.shape)).amax(1) > 0  # as the scales
        codes, scales = (part.view(its.shape) for part, its in zip(self._passes.encode_int8(new), old))
        of_codes = lost[:, None].expand(-1, GROUP).flatten()[: codes.numel()].view(codes.shape)
        return torch.where(of_codes, old[0], codes), torch.where(lost, old[1], scales)


_following = Following(groups, feedback)
quantize_with_residual = _following.quantize_with_residual
quantize_change = _following.quantize_change
dequantize_change = _following.dequantize_change
