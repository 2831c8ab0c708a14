"""How many bits each coefficient of an eigenbasis gets: reverse water-filling, in whole bits.

One bit more than b for values of variance v takes v (D(b) - D(b + 1)) off their squared error, D(b) being
that of b bits for a normal value of variance 1. Bits are given one at a time where that is most; each is
worth less than the one before it, so no other way of giving them leaves a smaller error (Gersho and Gray,
Vector Quantization and Signal Compression, 8.3).

Both sides have to choose alike, and where two kinds of processor add up moments their last bits differ. So
everything is counted in whole eighths of an octave, and of values that are worth the same the first ones get
the bit: of equal variances none is a little larger by chance.
"""

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ds_compress.kernels.quantize import gaussian

MOST_BITS = 8
"""Of one coefficient."""

_STEPS = 8
"""Of an octave of variance."""

_OCTAVES = 40
"""Below the largest variance lie those that count as all the same: what is left of zeros in a moment is
rounding."""


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


def share_out(levels: Tensor, bits: int) -> tuple[int, ...]:
    """Give so many groups of values `bits` bits each on average, exactly.

    Args:
        levels: of the groups, int32 on the CPU, none larger than the one before it.

    Returns:
        How many groups have at least 1, 2, ... MOST_BITS bits; they are the first ones.
    """
    worth = torch.tensor(_worth(), dtype=torch.int32, device="cpu")
    offers = (levels.unsqueeze(1) + worth).flatten()
    taken = offers.sort(descending=True, stable=True).indices[: len(levels) * bits]
    widths = torch.bincount(taken // MOST_BITS, minlength=len(levels))
    return tuple(int((widths >= width).sum()) for width in range(1, MOST_BITS + 1))


@cache
def _worth() -> tuple[int, ...]:
    """What the first, second, ... bit takes off the squared error of a value of variance 1, as a level."""
    left = [1.0, *(gaussian.normal_error(bits) ** 2 for bits in range(1, gaussian.LARGEST_BITS + 1))]
    found = [round(_STEPS * math.log2(before - after)) for before, after in pairwise(left)]
    while len(found) < MOST_BITS:
        found.append(found[-1] - 2 * _STEPS)  # on finer grids each bit leaves a quarter
    return tuple(found)
