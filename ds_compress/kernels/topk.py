"""The k largest magnitudes of each row, exactly k of them whatever the data.

Magnitudes are compared as integers (`keys`): the bits of a float without its sign grow with its magnitude, so one set
of functions serves all dtypes, and nan is nothing special. On a CPU the passes over all entries run in numpy, which
compares, partitions and lists true entries several times faster than torch; the result is the same to the bit.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import gpu, indices
from ds_compress.kernels.memory import keep_freed, scratch

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INFINITY = {
    dtype: torch.tensor(math.inf, dtype=dtype).view(_INTEGER[dtype.itemsize]).item()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The key of infinity: no key is larger."""

# Above this row length the k-th largest is looked for among the entries that pass a threshold taken from a sample.
LONG_ROW = 1 << 17
SAMPLE = 1 << 14


def keys(x: Tensor) -> Tensor:
    """Integers of the size of x's elements that order as |x| does; nan has the key of infinity.

    On a CPU the next call for a long x writes to the same memory.
    """
    integer = _INTEGER[x.element_size()]
    bits, largest = x.contiguous().view(integer), torch.iinfo(integer).max
    if not indices.on_cpu(x):
        return (bits & largest).clamp_(max=INFINITY[x.dtype])
    keep_freed(x.nbytes)
    size = scratch("keys", bits.shape, integer) if bits.numel() >= LONG_ROW else torch.empty_like(bits)
    np.bitwise_and(bits.numpy(), largest, out=size.numpy())
    return size.clamp_(max=INFINITY[x.dtype])


def kth_largest(size: Tensor, k: int) -> Tensor:
    """[rows, 1]: the k-th largest of each row of `size` [rows, d]."""
    if indices.on_cpu(size):
        place = size.shape[1] - k
        return torch.from_numpy(np.partition(size.numpy(), place, axis=1)[:, place:place + 1])
    return size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)


def sampled_band(size: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two thresholds [rows, 1] between which the k-th largest of each row of `size` [rows, d] almost surely lies.

    They are order statistics of a sample: the number of sampled entries among the k largest is about Poisson, and the
    band reaches three of its standard deviations to each side. The stride shares no factor with d, hence none with the
    width of the last dimension: one that did would see only some of the channels, and outlier channels are common.
    """
    d = size.shape[1]
    stride = max(1, d // SAMPLE)
    while math.gcd(stride, d) > 1:
        stride += 1
    sample = size[:, ::stride]
    expected = k * sample.shape[1] / d
    margin = 3 * math.sqrt(expected) + 1
    high, low = max(1, int(expected - margin)), min(sample.shape[1], math.ceil(expected + margin))
    return kth_largest(sample, high), kth_largest(sample, low)


def count_true(mask: Tensor) -> Tensor:
    """[rows, 1]: how many entries of each row of `mask` [rows, d] are true."""
    if indices.on_cpu(mask):  # torch counts along a dim ten times slower
        return torch.from_numpy(_count_rows(mask.numpy())).unsqueeze(1)
    return mask.count_nonzero(1).unsqueeze(1)


def exact(size: Tensor, k: int) -> Tensor:
    """The k largest entries of each row of `size` [rows, d], ties to the lowest index.

    Returns:
        Flat int64 indices [rows * k], ascending.
    """
    rows, d = size.shape
    if k == d or not rows:
        return torch.arange(size.numel(), device=size.device)
    if indices.on_cpu(size):
        return _exact_numpy(size, k)
    fused = gpu.kernels(size.device)
    return fused.exact(size, k) if fused else exact_reference(size, k)


def exact_reference(size: Tensor, k: int) -> Tensor:
    """`exact` in plain torch: the specification.

    `torch.topk` leaves open which of tied entries it returns, so only the k-th value is taken from it.
    """
    return _fill(size, kth_largest(size, k), k, spread=False)


def banded(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """k entries of each row of `size` [rows, d]: those first that reach more of the `bounds`, each [rows, 1] or a
    number, the lowest in front; of entries that reach equally many, as many as are needed, evenly spaced.

    Returns:
        Flat int64 indices [rows * k], ascending.
    """
    if indices.on_cpu(size):
        return _banded_numpy(size, bounds, k)
    fused = gpu.kernels(size.device)
    return fused.banded(size, bounds, k) if fused else banded_reference(size, bounds, k)


def banded_reference(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """`banded` in plain torch: the specification."""
    level = torch.zeros_like(size, dtype=torch.int8)
    cut = level.new_zeros(size.shape[0], 1)
    for bound in bounds:
        reached = size >= bound
        level += reached
        cut += count_true(reached) >= k
    return _fill(level, cut, k, spread=True)


def _fill(size: Tensor, cut: Tensor, k: int, spread: bool) -> Tensor:
    """All entries above `cut` [rows, 1], at most k, and as many of those equal to it as make k: the first ones, or
    evenly spaced ones."""
    above, tied = size > cut, size == cut
    room = k - count_true(above)
    rank = tied.cumsum(1, dtype=torch.int64 if spread else torch.int32)
    if spread:
        equal = rank[:, -1:].clamp(min=1)
        tied &= rank * room // equal > (rank - 1) * room // equal
    else:
        tied &= rank <= room
    return indices.positions((above | tied).flatten(), size.shape[0] * k)


def _exact_numpy(size: Tensor, k: int) -> Tensor:
    """In two stages where rows are long: what passes a sampled threshold, then the k largest of that."""
    rows, d = size.shape
    if d >= LONG_ROW:
        _, low = sampled_band(size, k)
        found, values, counts = _reaching(size, low)
        if counts.min() >= k:
            parts = np.split(values, np.cumsum(counts)[:-1])
            cut = np.array([np.partition(part, part.size - k)[part.size - k] for part in parts])
            return _fill_numpy(found, values, counts, cut, k)
    cut = kth_largest(size, k)
    return _fill_numpy(*_reaching(size, cut), cut.numpy().ravel(), k)


def _banded_numpy(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """Looks at the first two bounds only, which decide unless one of them was a bad guess or many entries tie."""
    below = above = None
    levels = [np.asarray(bound) for bound in bounds]
    if all((lower <= upper).all() for lower, upper in pairwise(levels)):
        below, above = (_reached(size, level, role) for level, role in zip(levels, ("below", "above")))
        room = k - _count_rows(above)
    if below is None or (room < 0).any() or (_count_rows(below) < k).any():
        return banded_reference(size, bounds, k)
    band = indices.flatnonzero(np.not_equal(below, above, out=below).ravel())
    equal = np.diff(np.searchsorted(band, np.arange(len(size) + 1) * size.shape[1]))
    above.ravel()[_share(band, equal, room, spread=True)] = True
    return torch.from_numpy(indices.flatnonzero(above.ravel()))


def _reached(size: Tensor, bound: np.ndarray, role: str) -> np.ndarray:
    """Bools [rows, d], in scratch memory: which entries of `size` reach `bound` [rows, 1] or a number."""
    return np.greater_equal(size.numpy(), bound, out=scratch(role, tuple(size.shape), torch.bool).numpy())


def _reaching(size: Tensor, bound: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat indices of the entries that reach `bound` [rows, 1], ascending, their values, and their number per row."""
    rows, d = size.shape
    found = indices.flatnonzero(_reached(size, bound.numpy(), "below").ravel())
    counts = np.diff(np.searchsorted(found, np.arange(rows + 1) * d))
    return found, size.numpy().ravel().take(found), counts


def _fill_numpy(found, values, counts, cut, k):
    """`_fill`, of the first ones, for the entries `found`, with their values and number per row; `cut` is [rows]."""
    cut = np.repeat(cut, counts)
    above = values > cut
    ends = np.cumsum(counts)
    tied = np.flatnonzero(values == cut)
    equal = np.diff(np.searchsorted(tied, ends), prepend=0)
    room = k - np.array([np.count_nonzero(part) for part in np.split(above, ends[:-1])])
    above[_share(tied, equal, room, spread=False)] = True
    return torch.from_numpy(found.take(np.flatnonzero(above)))


def _share(tied: np.ndarray, equal: np.ndarray, room: np.ndarray, spread: bool) -> np.ndarray:
    """Of `tied`, of which there are `equal` [rows] per row, the `room` [rows] of each that `_fill` would keep."""
    if (equal == room).all():
        return tied
    rank = np.arange(1, room.sum() + 1) - np.repeat(np.cumsum(room) - room, room)
    if spread:
        rank *= np.repeat(equal, room)
        rank = -(-rank // np.repeat(room, room))
    return tied[rank + np.repeat(np.cumsum(equal) - equal - 1, room)]


def _count_rows(mask: np.ndarray) -> np.ndarray:
    """[rows]: how many entries of each row are true; row by row, as numpy is slow along an axis."""
    return np.array([np.count_nonzero(row) for row in mask])
