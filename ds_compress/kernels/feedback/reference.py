"""What feedbacks do to a state and to a message."""

import torch
from torch import Tensor

from ds_compress.kernels.numerics import as_divisor, is_finite, narrow
from ds_compress.kernels.quantize.grid import SMALLEST_STEP

GROUP = 128
"""Values that share a scale in an int8 store."""


def changed(x: Tensor, state: Tensor, factor: float) -> Tensor:
    """x - factor * state, in x's dtype: within its range, and nan where `x` is not finite."""
    return narrow(x.to(state.dtype) - state * factor, x)


def moved(state: Tensor, change: Tensor, divisor: float) -> Tensor:
    """state + change / divisor."""
    return state + change.to(state.dtype) / as_divisor(divisor, state)


def advanced(state: Tensor, change: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """The same, and whether all of that is finite: a bool of one element."""
    new = moved(state, change, divisor)
    return new, is_finite(new)


def finite(x: Tensor) -> Tensor:
    """Whether all of `x` is: a bool of one element."""
    return is_finite(x)


def compensated(x: Tensor, residual: Tensor, factor: float, finite: Tensor) -> Tensor:
    """x + factor * residual, in x's dtype: within its range. Unless `finite`, a bool of one element, is true,
    `x` alone, and nan where it is not finite."""
    return narrow(x.to(residual.dtype) + residual * (finite.float() * factor), x)


def renewed(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, share: float, rest: float
) -> tuple[Tensor, Tensor]:
    """What remains of x + scale * residual when `sent` has been delivered, share * residual + rest * lost /
    scale; and whether all of that is finite, a bool of one element."""
    lost = x.to(residual.dtype) + residual * scale - sent
    new = blended(residual, lost, scale, share, rest)
    return new, is_finite(new)


def blended(residual: Tensor, lost: Tensor, scale: float, share: float, rest: float) -> Tensor:
    """share * residual + rest * lost / scale; a share of 0 leaves the first out, a scale or a rest of 1
    nothing to do."""
    lost = lost if scale == 1 else lost / as_divisor(scale, lost)
    lost = lost if rest == 1 else rest * lost
    return share * residual + lost if share else lost


def encode_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of value's shape, and one fp32 scale for each group of values in their order; of a group
    that is not finite, any codes."""
    groups = grouped(value)
    scales = int8_scales(groups)
    return int8_codes(groups, scales, value.shape), scales


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of what `encode_int8` gave."""
    return (grouped(codes) * scales[:, None]).flatten()[: codes.numel()].view(codes.shape)


def int8_scales(groups: Tensor) -> Tensor:
    """fp32 [groups]: the steps in which the largest of each is 127; of a finite inverse, or 0."""
    scales = groups.abs().amax(1) / as_divisor(127, groups) if groups.numel() else groups.new_zeros(0)
    return torch.where(scales > 0, scales.clamp(min=SMALLEST_STEP), scales)


def int8_codes(groups: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`groups` in steps of `scales`, one for each group, as int8 of `shape`."""
    # one division for a group instead of one for each value
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (groups * inverse[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten()[: torch.Size(shape).numel()].view(shape)


def grouped(value: Tensor) -> Tensor:
    """fp32 [groups, GROUP]: the values in their order, then zeros."""
    flat = value.float().flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
