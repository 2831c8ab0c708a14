"""A uniform grid per group: value = offset + step * code, code in 0 .. top.

Scales are rounded to their wire dtype before the codes are made, and outwards (offset down, step up), so the
grid that the receiver rebuilds always covers the group: no value is more than half a step away from its
code's value.

A group that holds inf or nan has an infinite or nan step and decodes to nan.
"""

import torch
from torch import Tensor


def minmax_grid(low: Tensor, high: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The grid from the smallest to the largest value of each group.

    Args:
        low, high: fp32 [n].
        scale_dtype: float32 or bfloat16.

    Returns:
        step, offset: [n], of `scale_dtype`.
    """
    low, high = low + 0.0, high + 0.0  # which of two zeros a reduction meets first depends on the processor
    offset = _at_most(low, scale_dtype)
    return _at_least((high - offset.float()) / top_code(bits, symmetric=False), scale_dtype), offset


def symmetric_grid(reach: Tensor, bits: int, scale_dtype: torch.dtype) -> Tensor:
    """The step of the grid from -reach to reach, fp32 [n] (`scale_dtype` as for `minmax_grid`).

    From 2 bits on 0 is on the grid, which takes an odd number of levels: -1, 0, 1 at 2 bits.
    """
    return _at_least(2 * reach / top_code(bits, symmetric=True), scale_dtype)


def symmetric_offset(step: Tensor, bits: int) -> Tensor:
    """The offset, fp32 [n], that a symmetric grid of `step` implies."""
    return step.float() * (-top_code(bits, symmetric=True) / 2)


def top_code(bits: int, symmetric: bool) -> int:
    """The largest code of the grid."""
    return 2**bits - 2 if symmetric and bits > 1 else 2**bits - 1


def to_codes(
    groups: Tensor, step: Tensor, offset: Tensor, top: int, generator: torch.Generator | None
) -> Tensor:
    """The codes, uint8 [n, G], of `groups`, fp32 [n, G], on the grid of `step` and `offset`, [n] each.

    Rounds to the nearest code, or with a generator to one of the two neighbours with probabilities that make
    the expected value equal to the input.
    """
    step = step.float()
    divisor = torch.where(step > 0, step, 1)  # all values of a group of step 0 equal its offset: code 0
    position = (groups - offset.float()[:, None]).div_(divisor[:, None])
    if generator is None:
        codes = position.add_(0.5)
    else:
        # the dither meets the fraction alone: added to the position it could round past the neighbour
        codes = position.floor()
        draw = torch.rand(codes.shape, generator=generator, dtype=torch.float32, device=codes.device)
        codes += draw < position.sub_(codes)
    return codes.clamp_(0, top).to(torch.uint8)  # the cast cuts the fraction off


def from_codes(codes: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """The values, fp32 [n, G], of `codes`, uint8 [n, G]."""
    return codes.float().mul_(step.float()[:, None]).add_(offset.float()[:, None])


def _at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of `dtype`, float32 or bfloat16, that is not below `x`, fp32; nan stays nan.

    A bfloat16 is the upper half of a float32: cutting the lower half off goes towards 0, which is up for
    negative numbers. In integers, because a compiler may leave the detour over bfloat16 out.
    """
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    rounded = (torch.where(bits < 0, bits, bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(x == x, rounded, x).to(dtype)


def _at_most(x: Tensor, dtype: torch.dtype) -> Tensor:
    return -_at_least(-x, dtype)
