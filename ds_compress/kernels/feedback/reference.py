"""State updates of feedbacks in PyTorch, alone and fused with quantization: the specification."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ds_compress.kernels.memory import Parts
from ds_compress.kernels.numerics import LARGEST_STATE, as_divisor, can_keep, narrow, rows_within
from ds_compress.kernels.quantize import reference as quantize
from ds_compress.kernels.quantize.grid import SMALLEST_STEP, Grid

__all__ = [
    "add_residual",
    "choose",
    "delta",
    "dequantize_change",
    "quantize_change",
    "quantize_with_residual",
    "update_residual",
]

GROUP = 128
"""Values that share a scale in int8 storage."""


def delta(x: Tensor, state: Tensor, factor: float) -> Tensor:
    """Return x - factor * state in x's dtype, saturated at its range, and nan where `x` is not finite."""
    return narrow(x.to(state.dtype) - state * factor, x)


def add_delta(state: Tensor, change: Tensor, divisor: float) -> Tensor:
    """Return state + change / divisor, in state's dtype; a divisor of 1 is no operation."""
    return state + (change if divisor == 1 else change.to(state.dtype) / as_divisor(divisor, state))


def update_state(state: Tensor, change: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """Return state + change / divisor, and whether it can be kept, see `can_keep`."""
    new = add_delta(state, change, divisor)
    return new, can_keep(new)


def add_residual(x: Tensor, residual: Tensor, factor: float, finite: Tensor) -> Tensor:
    """Return x + factor * residual in x's dtype, saturated at its range.

    Args:
        finite: a bool of one element. If it is false the result is `x`, and nan where `x` is not finite.
    """
    return narrow(x.to(residual.dtype) + residual * (finite.float() * factor), x)


def update_residual(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, residual_decay: float, error_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the residual after x + scale * residual was encoded and `sent` delivered.

    Returns:
        residual_decay * residual + error_weight * lost / scale, where `lost` is the part of the sum that was
        not delivered; and whether it can be kept, see `can_keep`.
    """
    lost = x.to(residual.dtype) + residual * scale - sent
    new = blend(residual, lost, scale, residual_decay, error_weight)
    return new, can_keep(new)


def blend(residual: Tensor, lost: Tensor, scale: float, residual_decay: float, error_weight: float) -> Tensor:
    """Return residual_decay * residual + error_weight * lost / scale; factors of 0 and 1 are no
    operations."""
    lost = lost if scale == 1 else lost / as_divisor(scale, lost)
    lost = lost if error_weight == 1 else error_weight * lost
    return residual_decay * residual + lost if residual_decay else lost


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return `first` if `condition`, a bool of one element, is true, else `second`, of the same shape and
    dtype. The host does not wait for a GPU."""
    return torch.where(condition, first, second)


def encode_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes of value's shape, and one fp32 scale per GROUP values. The codes of a group that is
    not finite may be anything."""
    groups = grouped(value)
    scales = groups.abs().amax(1) / as_divisor(127, groups) if groups.numel() else groups.new_zeros(0)
    scales = torch.where(scales > 0, scales.clamp(min=SMALLEST_STEP), scales)  # with a finite inverse
    inverse = torch.where(scales > 0, 1 / scales, 0)  # one division per group, not one per value
    codes = (groups * inverse[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten()[: value.numel()].view(value.shape), scales


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of what `encode_int8` returned."""
    return (grouped(codes) * scales[:, None]).flatten()[: codes.numel()].view(codes.shape)


def grouped(value: Tensor) -> Tensor:
    """Return the values as fp32 [groups, GROUP], padded with zeros."""
    flat = value.float().flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


class FusedFeedback:
    """Quantization of messages together with the state update of a feedback, made of the functions of a
    backend.

    Values are float32 or bfloat16 and lie in groups. A state has their shape; it is stored as float32, as
    bfloat16, or as int8 codes and their scales (`encode_int8`). A group keeps its state if its values are not
    finite, or if the next state is beyond `LARGEST_STATE`; other groups do not.
    """

    def __init__(self, quantize: ModuleType):
        """
        Args:
            quantize: has the functions of `quantize/reference.py`.
        """
        self._quantize = quantize

    def quantize_with_residual(
        self,
        values: Tensor,
        residual: Parts,
        scale: float,
        residual_decay: float,
        error_weight: float,
        grid: Grid,
        size: int,
        out: Parts | None = None,
    ) -> tuple[Parts, Parts]:
        """Quantize values + scale * residual in the dtype of `values`.

        Args:
            residual: as stored, at most `LARGEST_STATE`. It may be overwritten. Groups that are not finite
                are sent without it.
            residual_decay: at most 1, like `error_weight`.
            size: of the groups; the number of values is a multiple of it.
            out: see `quantize`.

        Returns:
            What `quantize` returns; and the next residual as stored, see `update_residual`.
        """
        before = decode_int8(*residual) if len(residual) == 2 else residual[0].float()
        before, groups = before.reshape(-1, size), values.reshape(-1, size)
        finite = rows_within(groups, torch.finfo(groups.dtype).max)
        total = groups.float() + before * (finite.float() * scale)
        parts = self._quantize.quantize(narrow(total, groups), grid, None, out)
        lost = total - self._quantize.dequantize(parts, grid, groups.dtype).float()
        return parts, self._stored(residual, blend(before, lost, scale, residual_decay, error_weight))

    def quantize_change(
        self, values: Tensor, state: Tensor, scale: float, grid: Grid, size: int, out: Parts | None = None
    ) -> tuple[Parts, Tensor]:
        """Quantize values - scale * state in the dtype of `values`.

        Args:
            state: at most `LARGEST_STATE`. It may be overwritten.
            size, out: see `quantize_with_residual`.

        Returns:
            What `quantize` returns; and the next state, equal to that of `dequantize_change`.
        """
        change = delta(values, state.float(), scale).reshape(-1, size)
        parts = self._quantize.quantize(change, grid, None, out)
        return parts, self._advance(parts, state, scale, grid, values.dtype)[1]

    def dequantize_change(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Decode what `quantize_change` returned as `parts`. `state` may be overwritten.

        Returns:
            The values, of `dtype` and state's shape: scale times the next state in fp32, or what is not
            finite; and the next state.
        """
        new, stored = self._advance(parts, state, scale, grid, dtype)
        return (new * scale).to(dtype).view(state.shape), stored

    def _advance(
        self, parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the next state, fp32 [n, G], and as stored."""
        change = self._quantize.dequantize(parts, grid, dtype)
        new = add_delta(state.float().reshape(change.shape), change, scale)
        return new, self._stored((state,), new)[0]

    def _stored(self, old: Parts, new: Tensor) -> Parts:
        """Return `new`, fp32 [n, G], stored as `old` is; groups beyond `LARGEST_STATE` keep `old`.
        Groups that share the scale of an int8 code with such a group keep theirs too."""
        if len(old) == 1:
            stored = new.bfloat16() if old[0].dtype == torch.bfloat16 else new
            before = old[0].reshape(new.shape).to(stored.dtype)
            kept = torch.where(rows_within(new, LARGEST_STATE), stored, before)
            return (kept.view(old[0].shape),)
        lost = grouped(~rows_within(new, LARGEST_STATE).expand(new.shape)).amax(1) > 0  # [scales]
        codes, scales = (part.view(before.shape) for part, before in zip(encode_int8(new), old))
        of_codes = lost[:, None].expand(-1, GROUP).flatten()[: codes.numel()].view(codes.shape)
        return torch.where(of_codes, old[0], codes), torch.where(lost, old[1], scales)


_fused = FusedFeedback(quantize)
quantize_with_residual = _fused.quantize_with_residual
quantize_change = _fused.quantize_change
dequantize_change = _fused.dequantize_change
