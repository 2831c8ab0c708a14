"""Bits for each coefficient of an eigenbasis: reverse water-filling, in whole bits.

One bit more than b for values of variance v reduces their squared error by v (D(b) - D(b + 1)), where D(b)
is that of b bits for a normal value of variance 1. Each bit goes where it reduces the error most, by less
than the one before. So no other allocation has a smaller error (Gersho and Gray, Vector Quantization and
Signal Compression, 8.3).

Both sides must allocate alike, and the last bits of moments differ between kinds of processor. So everything
is counted in whole eighths of an octave, and among equal values the first ones get the bit.
"""

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ds_compress.kernels.quantize import gaussian

MOST_BITS = 8
"""The most bits of one coefficient."""

_STEPS = 8
"""Steps in an octave of variance."""

_OCTAVES = 40
"""Variances so far below the largest count as equal: they are the rounding of zeros in a moment."""


def log_levels(variances: Tensor) -> Tensor:
    """Return the logarithms of `variances`, float64 [h], as int32 [h] in steps of an eighth octave from the
    largest."""
    largest = variances.amax()
    share = torch.where(largest > 0, variances / largest, 1.0).clamp(min=2.0**-_OCTAVES)
    return (_STEPS * share.log2()).round().to(torch.int32)


def levels_of(variances: Tensor) -> Tensor:
    """Return `log_levels` of variances that fall, but for those that are nearly equal: int32 [h].

    A basis has those in any order: each counts as large as the largest after it, so that levels fall.
    """
    return log_levels(variances).flip(0).cummax(0).values.flip(0).contiguous()


def allocate_bits(levels: Tensor, bits: int) -> tuple[int, ...]:
    """Allocate bits to groups of values: `bits` for each on average, exactly.

    Args:
        levels: of the groups, int32 on the CPU, falling.

    Returns:
        How many groups, the first ones, have at least 1, 2, ... MOST_BITS bits.
    """
    worth = torch.tensor(_worth(), dtype=torch.int32, device="cpu")
    offers = (levels.unsqueeze(1) + worth).flatten()
    taken = offers.sort(descending=True, stable=True).indices[: len(levels) * bits]
    widths = torch.bincount(taken // MOST_BITS, minlength=len(levels))
    return tuple(int((widths >= width).sum()) for width in range(1, MOST_BITS + 1))


@cache
def _worth() -> tuple[int, ...]:
    """Return, as levels, by how much each bit reduces the squared error of a value of variance 1."""
    left = [1.0, *(gaussian.normal_error(bits) ** 2 for bits in range(1, gaussian.LARGEST_BITS + 1))]
    found = [round(_STEPS * math.log2(before - after)) for before, after in pairwise(left)]
    while len(found) < MOST_BITS:
        found.append(found[-1] - 2 * _STEPS)  # on finer grids each bit leaves a quarter
    return tuple(found)
