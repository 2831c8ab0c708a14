"""The k largest magnitudes of each row, exactly k of them whatever the data.

Magnitudes are compared as integers (`keys`): the bits of a float without its sign grow with its magnitude, so one set
of functions serves all dtypes, and nan is nothing special. On a CPU the passes over all entries run in numpy, which
compares, partitions and lists true entries several times faster than torch; the result is the same to the bit.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels.indices import flatnonzero, positions

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
    """Integers of the size of x's elements that order as |x| does; nan has the key of infinity."""
    integer = _INTEGER[x.element_size()]
    bits = x.contiguous().view(integer)
    if x.device.type == "cpu":
        without_sign = torch.from_numpy(np.bitwise_and(bits.numpy(), torch.iinfo(integer).max))
    else:
        without_sign = bits & torch.iinfo(integer).max
    return without_sign.clamp_(max=INFINITY[x.dtype])


def kth_largest(size: Tensor, k: int) -> Tensor:
    """[rows, 1]: the k-th largest of each row of `size` [rows, d]."""
    if size.device.type == "cpu":
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


def fill(size: Tensor, cut: Tensor, k: int, spread: bool = False) -> Tensor:
    """Exactly k entries of each row of `size` [rows, d]: all above `cut` [rows, 1], the rest from those equal to it.

    There must be at most k above, and at least k not below. Of the equal ones the first are taken or, with `spread`,
    evenly spaced ones.

    Returns:
        Flat int64 indices [rows * k], ascending.
    """
    return (_fill_numpy if size.device.type == "cpu" else fill_reference)(size, cut, k, spread)


def fill_reference(size: Tensor, cut: Tensor, k: int, spread: bool = False) -> Tensor:
    """`fill` in plain torch: the specification."""
    above, tied = size > cut, size == cut
    room = k - above.sum(1, keepdim=True)
    rank = tied.cumsum(1, dtype=torch.int64 if spread else torch.int32)
    if spread:
        tied &= rank * room // rank[:, -1:] > (rank - 1) * room // rank[:, -1:]
    else:
        tied &= rank <= room
    return positions((above | tied).flatten(), size.shape[0] * k)


def _fill_numpy(size: Tensor, cut: Tensor, k: int, spread: bool) -> Tensor:
    rows, d = size.shape
    found = flatnonzero(size.numpy() >= cut.numpy())
    if found.size == rows * k:
        return torch.from_numpy(found)
    return torch.from_numpy(_trim(found, size.numpy().ravel()[found], cut.numpy().ravel(), rows, d, k, spread))


def _trim(found, values, cut, rows, d, k, spread):
    """`found` without the entries that are too many; `values` are theirs, none below `cut` [rows]."""
    counts = _count_per_row(found, rows, d)
    tied = values == np.repeat(cut, counts)
    rank = np.cumsum(tied)
    ends = np.cumsum(counts) - 1
    so_far = np.concatenate([[0], rank[ends]])
    equal = np.diff(so_far)
    rank -= np.repeat(so_far[:-1], counts)
    room = np.repeat(k - (counts - equal), counts)
    if spread:
        equal = np.repeat(np.maximum(equal, 1), counts)
        keep = ~tied | (rank * room // equal > (rank - 1) * room // equal)
    else:
        keep = ~tied | (rank <= room)
    return found[np.flatnonzero(keep)]


def _count_per_row(found, rows, d):
    """How many of the ascending flat indices `found` lie in each row."""
    return np.diff(np.searchsorted(found, np.arange(rows + 1) * d))


def exact(size: Tensor, k: int) -> Tensor:
    """The k largest entries of each row of `size` [rows, d], ties to the lowest index.

    `torch.topk` leaves open which of tied entries it returns, so only the k-th value is taken from it.

    Returns:
        Flat int64 indices [rows * k], ascending.
    """
    rows, d = size.shape
    if k == d or not rows:
        return torch.arange(size.numel(), device=size.device)
    if size.device.type == "cpu" and d >= LONG_ROW:
        return _exact_in_two_stages(size, k)
    return fill(size, kth_largest(size, k), k)


def _exact_in_two_stages(size: Tensor, k: int) -> Tensor:
    """Entries above a sampled threshold first, then the k largest among them; all entries where those are too few."""
    rows, d = size.shape
    _, low = sampled_band(size, k)
    found = flatnonzero(size.numpy() >= low.numpy())
    counts = _count_per_row(found, rows, d)
    if counts.min() < k:
        return fill(size, kth_largest(size, k), k)
    values = size.numpy().ravel()[found]
    parts = np.split(values, np.cumsum(counts)[:-1])
    cut = np.array([np.partition(part, part.size - k)[part.size - k] for part in parts])
    reach = np.flatnonzero(values >= np.repeat(cut, counts))
    found = found[reach]
    if found.size > rows * k:
        found = _trim(found, values[reach], cut, rows, d, k, spread=False)
    return torch.from_numpy(found)
