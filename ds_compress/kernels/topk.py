"""The k largest magnitudes of each row, exactly k of them whatever the data.

Magnitudes are compared as integers (`keys`): the bits of a float without its sign grow with its magnitude, so one set
of functions serves all dtypes, and nan is nothing special. On a CPU the passes over all entries run in numpy, which
compares, partitions and lists true entries several times faster than torch; the result is the same to the bit.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import gpu, indices

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
    if indices.on_cpu(x):
        without_sign = torch.from_numpy(np.bitwise_and(bits.numpy(), torch.iinfo(integer).max))
    else:
        without_sign = bits & torch.iinfo(integer).max
    return without_sign.clamp_(max=INFINITY[x.dtype])


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
        return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1, keepdims=True))
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
            return _fill_numpy(found, values, counts, cut, k, spread=False)
    cut = kth_largest(size, k)
    return _fill_numpy(*_reaching(size, cut), cut.numpy().ravel(), k, spread=False)


def _banded_numpy(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    found, values, counts = _reaching(size, bounds[0])
    if counts.min() < k:
        return banded_reference(size, bounds, k)
    ends = np.cumsum(counts)[:-1]
    level, cut = np.zeros(values.shape, np.int8), np.zeros(counts.shape, np.int8)
    for bound in bounds[1:]:
        bound = np.broadcast_to(np.asarray(bound, values.dtype).ravel(), counts.shape)
        reached = values >= np.repeat(bound, counts)
        level += reached
        cut += np.array([np.count_nonzero(part) >= k for part in np.split(reached, ends)])
    return _fill_numpy(found, level, counts, cut, k, spread=True)


def _reaching(size: Tensor, bound: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat indices of the entries that reach `bound` [rows, 1], ascending, their values, and their number per row."""
    rows, d = size.shape
    found = indices.flatnonzero(size.numpy() >= bound.numpy())
    counts = np.diff(np.searchsorted(found, np.arange(rows + 1) * d))
    return found, size.numpy().ravel().take(found), counts


def _fill_numpy(found, values, counts, cut, k, spread):
    """`_fill` for the entries `found`, with their values and number per row; `cut` is [rows]."""
    cut = np.repeat(cut, counts)
    reaching = values >= cut
    if np.count_nonzero(reaching) == counts.size * k:
        return torch.from_numpy(found.take(np.flatnonzero(reaching)))
    tied = values == cut
    rank = np.cumsum(tied)
    so_far = np.concatenate([[0], rank[np.cumsum(counts) - 1]])
    above = np.add.reduceat(values > cut, np.cumsum(counts) - counts, dtype=np.int64)
    equal, room = np.repeat(np.diff(so_far), counts), np.repeat(k - above, counts)
    rank -= np.repeat(so_far[:-1], counts)
    if spread:
        equal = np.maximum(equal, 1)
        tied &= rank * room // equal > (rank - 1) * room // equal
    else:
        tied &= rank <= room
    return torch.from_numpy(found[np.flatnonzero(tied | (values > cut))])
