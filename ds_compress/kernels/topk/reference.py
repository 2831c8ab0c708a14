"""The k largest magnitudes of each row, exactly k of them whatever the data; compared as `keys`.

What `exact` and `banded` return: `held`, ascending, and the kept entries too where they were made on the way.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.topk import sampling
from ds_compress.kernels.topk.bitstring import positions
from ds_compress.kernels.topk.keys import keys
from ds_compress.kernels.topk.small_ops import count_true, kth_largest


class Steps(NamedTuple):
    """Functions that the others are made of, as a backend has them."""

    kth_largest: Callable[[Tensor, int], Tensor]
    count_true: Callable[[Tensor], Tensor]
    positions: Callable[[Tensor, int], Tensor]


_STEPS = Steps(kth_largest, count_true, positions)


def exact(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The k entries of each row of `x` [rows, d] with the largest keys, ties to the lowest index; 0 < k.

    `values`: contiguous memory [rows * k] for the kept entries, where they are made on the way.
    """
    return exact_by(_STEPS, x, k), None


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> tuple[Tensor, Tensor | None]:
    """k entries of each row of `x` [rows, d]: those first whose key reaches more of the `bounds`, each [rows,
    1] or a number, the lowest in front; of entries that reach equally many, as many as are needed, evenly
    spaced; 0 < k."""
    return banded_by(_STEPS, x, bounds, k), None


def sampled_band(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two keys [rows, 1], the higher one first, between which that of the k-th largest of each row of `x`
    [rows, d] almost surely lies: order statistics of a sample (see `sampling`)."""
    return sampled_band_by(_STEPS, x, k)


def exact_by(steps: Steps, x: Tensor, k: int) -> Tensor:
    """The indices of `exact`.

    `torch.topk` leaves open which of tied entries it returns, so only the k-th value is taken from it.
    """
    size = keys(x)
    return _filled(steps, size, steps.kth_largest(size, k), k, spread=False)


def banded_by(steps: Steps, x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """The indices of `banded`."""
    size = keys(x)
    level = torch.zeros_like(size, dtype=torch.int8)
    cut = level.new_zeros(size.shape[0], 1)
    for bound in bounds:
        reached = size >= bound
        level += reached
        cut += steps.count_true(reached) >= k
    return _filled(steps, level, cut, k, spread=True)


def sampled_band_by(steps: Steps, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    stride, high, low = sampling.plan(x.shape[1], k)
    sample = keys(x[:, ::stride])
    return steps.kth_largest(sample, high), steps.kth_largest(sample, low)


def _filled(steps: Steps, size: Tensor, cut: Tensor, k: int, spread: bool) -> Tensor:
    """All entries above `cut` [rows, 1], at most k, and as many of those equal to it as make k: the first
    ones, or evenly spaced ones."""
    above, tied = size > cut, size == cut
    room = k - steps.count_true(above)
    rank = tied.cumsum(1, dtype=torch.int64 if spread else torch.int32)
    if spread:
        equal = rank[:, -1:].clamp(min=1)
        tied &= rank * room // equal > (rank - 1) * room // equal
    else:
        tied &= rank <= room
    return steps.positions((above | tied).flatten(), size.shape[0] * k)
