"""A grid for normal values per group: the levels of Lloyd and Max, times a scale of least squared error.

    | code, 2 bits         | 0       | 1       | 2      | 3      |
    | value / scale        | -1.5104 | -0.4528 | 0.4528 | 1.5104 |

The code of a value is that of the level nearest to it in units of the group's root mean square; the scale is
then the one that fits these codes best, s = sum(x c) / sum(c c), so no group loses more than if zeros were
sent, whatever its values. Lloyd, Least squares quantization in PCM, IEEE Trans. Inf. Theory 28 (1982); Max,
Quantizing for minimum distortion, IRE Trans. Inf. Theory 6 (1960).

Values are first divided by a power of two, so that no square leaves the range of fp32. Sums add halves to
halves: every kernel on every device gives the same bits. A group that holds inf or nan has a scale of nan.
"""

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from ds_compress.kernels.quantize.grid import Grid

LARGEST_BITS = 4

LARGEST_SCALE = 2.0**124
"""Levels are below 4: with it, too, all values are finite."""

_UNIT = 2.0**-16
"""Tables are rounded to multiples of it: exact in fp32, and the same whatever the last bits of `math.erf`."""


@cache
def levels(bits: int) -> tuple[float, ...]:
    """Return the levels above 0 of `bits` bits, smallest first; those below 0 mirror them."""
    return tuple(round(level / _UNIT) * _UNIT for level in _lloyd_max(2 ** (bits - 1)))


@cache
def squared_boundaries(bits: int) -> tuple[float, ...]:
    """Return the squares of the middles between neighbours among `levels`."""
    middles = [(low + high) / 2 for low, high in pairwise(levels(bits))]
    return tuple(round(middle**2 / _UNIT) * _UNIT for middle in middles)


def _lloyd_max(count: int) -> list[float]:
    """Return the `count` levels above 0 of the symmetric grid of least squared error for normal values.

    Each level is the mean of the values that are nearest to it.
    """
    normal = NormalDist()
    found, before = [3 * (i + 0.5) / count for i in range(count)], [0.0]
    while max(abs(new - old) for new, old in zip(found, before)) > 1e-12:
        ends = [0.0, *((low + high) / 2 for low, high in pairwise(found)), 40.0]
        before, found = found, []
        for low, high in pairwise(ends):
            share = normal.cdf(high) - normal.cdf(low)
            found.append((normal.pdf(low) - normal.pdf(high)) / share)
    return found


def to_codes(groups: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 [n, G], and the scales, [n] of the scale dtype, of `groups`.

    Args:
        groups: fp32 [n, G], G a power of two.
    """
    size, half = groups.shape[1], 2 ** (grid.bits - 1)
    exponent = _exponent(groups.abs().amax(1))
    groups = groups * _two_to(-exponent)[:, None]
    square = groups * groups
    mean = (tree_sum(square) * (1 / size))[:, None]
    place = torch.zeros_like(groups, dtype=torch.uint8)
    level = torch.full_like(groups, levels(grid.bits)[0])
    for boundary, above in zip(squared_boundaries(grid.bits), levels(grid.bits)[1:]):
        beyond = square > mean * boundary
        place += beyond
        level = torch.where(beyond, above, level)
    fitted = tree_sum(groups.abs() * level) / tree_sum(level * level)
    scale = (fitted * _two_to(exponent)).clamp(max=LARGEST_SCALE)
    codes = torch.where(groups < 0, half - 1 - place, half + place)
    return codes, (scale + (fitted - fitted)).to(grid.scale_dtype)


def from_codes(codes: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return the values, fp32 [n, G], of what `to_codes` returned."""
    half = 2 ** (grid.bits - 1)
    below = codes < half
    place = torch.where(below, half - 1 - codes, codes - half)
    value = scale.float()[:, None] * levels(grid.bits)[0]
    for i, level in enumerate(levels(grid.bits)[1:]):
        value = torch.where(place > i, scale.float()[:, None] * level, value)
    return torch.where(below, -value, value)


def tree_sum(values: Tensor) -> Tensor:
    """Return the sums, [n], of the rows of `values`, [n, G], G a power of two, by adding halves."""
    while values.shape[1] > 1:
        first, second = values.chunk(2, dim=1)
        values = first + second
    return values[:, 0]


def _exponent(magnitude: Tensor) -> Tensor:
    """Return the exponent of `magnitude`, fp32, as int32 within -126 .. 126; inf and nan have 126."""
    return ((magnitude.view(torch.int32) >> 23) - 127).clamp(-126, 126)


def _two_to(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly, as fp32; `exponent` is int32."""
    return ((exponent + 127) << 23).view(torch.float32)


def error_bound(bits: int, size: int) -> float:
    """Return the largest ||x - C(x)|| / ||x|| of any group of `size` values.

    Least squares leave 1 - cos^2 of the angle between values x and levels c. In units of the root mean
    square, sum(x c) is at least p times the energy of the values below the last boundary plus c_top times
    the root of that above, and sum(c c) at most size (c_0^2 + r^2), with p the least ratio of a level to the
    boundary above it and r the largest of a level to the one below it.
    """
    table, middles = levels(bits), [math.sqrt(square) for square in squared_boundaries(bits)]
    below = min((level / middle for level, middle in zip(table, middles)), default=1.0)
    above = max((level / middle for level, middle in zip(table[1:], middles)), default=0.0)
    cosine = min(below**2, table[-1] ** 2 / size) / (table[0] ** 2 + above**2)
    return math.sqrt(1 - 0.999 * cosine)


@cache
def normal_error(bits: int) -> float:
    """Return ||x - C(x)|| / ||x|| of many standard normal values."""
    edges = [0.0, *map(math.sqrt, squared_boundaries(bits)), 40.0]
    normal = NormalDist()
    # least squares: 1 - sum(x c)^2 / (sum(x x) sum(c c))
    product = energy = 0.0
    for level, (low, high) in zip(levels(bits), pairwise(edges)):
        product += 2 * level * (normal.pdf(low) - normal.pdf(high))
        energy += 2 * level**2 * (normal.cdf(high) - normal.cdf(low))
    return math.sqrt(1 - product**2 / energy)
