"""A uniform grid per group: value = offset + step * code, code in 0 .. top.

Scales are rounded to their wire dtype before the codes are made, and outwards (offset down, step up), so the
grid that the receiver rebuilds always covers the group: no value is more than half a step away from its
code's value.

A group that holds inf or nan has an infinite or nan step and decodes to nan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_compress.kernels.numerics import as_divisor
from ds_compress.kernels.quantize.dither import draws

SMALLEST_STEP = 2.0**-126
"""Above 0: the smallest normal number."""


@dataclass(frozen=True, eq=False)  # codecs keep theirs, and every message looks something up by it
class Grid:
    """What the grids of all groups of a tensor share; where each lies follows from its group."""

    bits: int
    """Of one code, 1 to 8."""

    symmetric: bool = False
    """Around 0, given by its step alone, instead of one from the smallest to the largest value."""

    scale_dtype: torch.dtype = torch.bfloat16
    """Of step and offset: float32 or bfloat16."""

    hadamard: bool = False
    """For the rotation of a group (`kernels.hadamard`), whose size is then a power of two."""

    key: int = 0
    """Of the rotation's signs."""

    gaussian: bool = False
    """Not uniform, but for normal values (`kernels.gaussian`): symmetric, 1 to 4 bits, of groups whose size
    is a power of two."""

    @cached_property
    def top(self) -> int:
        """The largest code. From 2 bits on 0 is on a symmetric grid, which takes an odd number of levels:
        -1, 0, 1 at 2 bits."""
        return 2**self.bits - 2 if self.symmetric and self.bits > 1 else 2**self.bits - 1

    @cached_property
    def is_mean(self) -> bool:
        """Whether the step follows from the mean magnitude, unless dithered codes have to be unbiased: it is
        that of least squared error when a value becomes -m or m (1-bit SGD, XNOR-Net)."""
        return self.symmetric and self.bits == 1 and not self.gaussian


def minmax_scales(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Step and offset, [n] of the scale dtype, of grids from `low` to `high`, fp32 [n]."""
    low, high = low + 0.0, high + 0.0  # which of two zeros a reduction meets first depends on the processor
    offset = _at_most(low, grid.scale_dtype)
    return _step((high - offset.float()) / as_divisor(grid.top, high), grid), offset


def symmetric_scale(reach: Tensor, grid: Grid) -> Tensor:
    """Step, [n] of the scale dtype, of grids from -reach to reach, fp32 [n]."""
    return _step(2 * reach / as_divisor(grid.top, reach), grid)


def _step(least: Tensor, grid: Grid) -> Tensor:
    """The smallest step, [n] of the scale dtype, that is not below `least`, fp32 [n], and whose inverse is
    finite; 0 stays 0."""
    step = _at_least(least, grid.scale_dtype)
    return torch.where(step > 0, step.clamp(min=SMALLEST_STEP), step)


def offset_of(scales: Sequence[Tensor], grid: Grid) -> Tensor:
    """The offset, [n], of grids whose `scales` are step and offset, or step alone, which implies it."""
    return scales[0].float() * (-grid.top / 2) if grid.symmetric else scales[1]


def to_codes(groups: Tensor, scales: Sequence[Tensor], grid: Grid, dither: int | None) -> Tensor:
    """The codes, uint8 [n, G], of `groups`, fp32 [n, G], on grids whose scales are `scales`, [n] each.

    Rounds to the nearest code, or by the draws of `dither` to one of the two neighbours with probabilities
    that make the expected value equal to the input.
    """
    step, offset = scales[0].float(), offset_of(scales, grid).float()
    # all values of a group of step 0 equal its offset: code 0; one division for a group instead of one for
    # each value, which is most of what a GPU would have to do
    inverse = torch.where(step > 0, 1 / step, 1)
    position = (groups - offset[:, None]).mul_(inverse[:, None])
    if dither is None:
        return position.add_(0.5).clamp_(0, grid.top).to(torch.uint8)  # the cast cuts the fraction off
    # in 16 bits behind the point, which a draw as long carries over as often as they say
    position = torch.where(position > 0, position, 0).clamp_(max=grid.top)
    fixed = position.mul_(65536).add_(0.5).to(torch.int32)
    n, size = groups.shape
    return (fixed + draws((n, size), dither, groups.device) >> 16).to(torch.uint8)


def from_codes(codes: Tensor, scales: Sequence[Tensor], grid: Grid) -> Tensor:
    """The values, fp32 [n, G], of `codes`, uint8 [n, G]."""
    step, offset = scales[0].float(), offset_of(scales, grid).float()
    return codes.float().mul_(step[:, None]).add_(offset[:, None])


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
