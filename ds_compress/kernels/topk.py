"""The k largest magnitudes of each row, exactly k of them whatever the data.

Magnitudes are compared as integers (`keys`): the bits of a float without its sign grow with its magnitude, so
one set of functions serves all dtypes, and nan is nothing special.
"""

import math
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import bitstring, gpu, native
from ds_compress.kernels.native.selection import Candidates
from ds_compress.kernels.selection import Selection

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INFINITY: dict[torch.dtype, int] = {
    dtype: int(torch.tensor(math.inf, dtype=dtype, device="cpu").view(_INTEGER[dtype.itemsize]).item())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The key of infinity: no key is larger."""

# Above this row length the k-th largest is looked for among the entries that pass a threshold taken from a
# sample.
LONG_ROW = 1 << 17
SAMPLE = 1 << 14

LONGEST_ROW = 1 << 30
"""Of the Triton kernels: longer rows are left to plain torch."""


def keys(x: Tensor) -> Tensor:
    """Integers of the size of x's elements that order as |x| does; nan has the key of infinity."""
    bits = as_integers(x)
    return (bits & torch.iinfo(bits.dtype).max).clamp_(max=INFINITY[x.dtype])


def as_integers(x: Tensor) -> Tensor:
    """The bits of x's elements, as signed integers of their size."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def _fused(x: Tensor) -> ModuleType | None:
    """The Triton kernels, if they serve rows like those of `x`: keys and places in a row are int32 there."""
    return gpu.kernels(x.device) if x.itemsize <= 4 and x.shape[1] <= LONGEST_ROW else None


def kth_largest(size: Tensor, k: int) -> Tensor:
    """[rows, 1]: the k-th largest of each row of `size` [rows, d]."""
    if bitstring.on_cpu(size):
        place = size.shape[1] - k
        return torch.from_numpy(np.partition(size.numpy(), place, axis=1)[:, place : place + 1])
    return size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)


def sampled_band(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two keys [rows, 1], the higher one first, between which that of the k-th largest of each row of `x`
    [rows, d] almost surely lies: order statistics of a sample (see `sampling`)."""
    stride, high, low = sampling(x.shape[1], k)
    fused = _fused(x)
    if fused:
        return fused.sampled_band(x, stride, high, low)
    sample = keys(x[:, ::stride])
    return kth_largest(sample, high), kth_largest(sample, low)


def sampling(d: int, k: int) -> tuple[int, int, int]:
    """(stride, high, low): which entries of a row of d to sample, every stride-th, and the ranks, 1 for the
    largest, of two of them between which the k-th largest of the row almost surely lies.

    The number of sampled entries among the k largest is about Poisson, and the ranks reach three of its
    standard deviations to each side. The stride shares no factor with d, hence none with the width of the
    last dimension: one that did would see only some of the channels, and outlier channels are common.
    """
    stride = max(1, d // SAMPLE)
    while math.gcd(stride, d) > 1:
        stride += 1
    length = -(-d // stride)
    expected = k * length / d
    margin = 3 * math.sqrt(expected) + 1
    return stride, max(1, int(expected - margin)), min(length, math.ceil(expected + margin))


def count_true(mask: Tensor) -> Tensor:
    """[rows, 1]: how many entries of each row of `mask` [rows, d] are true."""
    if bitstring.on_cpu(mask):  # torch counts along a dim ten times slower
        counts = [[np.count_nonzero(row)] for row in mask.numpy()]
        return torch.tensor(counts, dtype=torch.int64, device="cpu").view(-1, 1)
    return mask.count_nonzero(1).unsqueeze(1)


def exact(x: Tensor, k: int) -> Selection:
    """The k entries of each row of `x` [rows, d] with the largest keys, ties to the lowest index;
    ascending."""
    rows, d = x.shape
    fused = _fused(x)
    if k == d or not rows:
        chosen = torch.arange(x.numel(), dtype=torch.int64, device=x.device)
    elif native.serves("selection", x.device, x.numel()):
        chosen = _exact_native(x, k)
    elif fused:
        return fused.exact(x, k)
    else:
        chosen = exact_reference(keys(x), k)
    return Selection.at(chosen, x.numel())


def exact_reference(size: Tensor, k: int) -> Tensor:
    """The flat int64 indices of `exact`, from keys, in plain torch: the specification.

    `torch.topk` leaves open which of tied entries it returns, so only the k-th value is taken from it.
    """
    return _fill(size, kth_largest(size, k), k, spread=False)


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Selection:
    """k entries of each row of `x` [rows, d]: those first whose key reaches more of the `bounds`, each [rows,
    1] or a number, the lowest in front; of entries that reach equally many, as many as are needed, evenly
    spaced; ascending.
    """
    fused = _fused(x)
    if fused:
        return fused.banded(x, bounds, k)
    chosen = _banded_native(x, bounds, k) if native.serves("selection", x.device, x.numel()) else None
    return Selection.at(banded_reference(keys(x), bounds, k) if chosen is None else chosen, x.numel())


def banded_reference(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """The flat int64 indices of `banded`, from keys, in plain torch: the specification."""
    level = torch.zeros_like(size, dtype=torch.int8)
    cut = level.new_zeros(size.shape[0], 1)
    for bound in bounds:
        reached = size >= bound
        level += reached
        cut += count_true(reached) >= k
    return _fill(level, cut, k, spread=True)


def _fill(size: Tensor, cut: Tensor, k: int, spread: bool) -> Tensor:
    """All entries above `cut` [rows, 1], at most k, and as many of those equal to it as make k: the first
    ones, or evenly spaced ones."""
    above, tied = size > cut, size == cut
    room = k - count_true(above)
    rank = tied.cumsum(1, dtype=torch.int64 if spread else torch.int32)
    if spread:
        equal = rank[:, -1:].clamp(min=1)
        tied &= rank * room // equal > (rank - 1) * room // equal
    else:
        tied &= rank <= room
    return bitstring.positions((above | tied).flatten(), size.shape[0] * k)


def _exact_native(x: Tensor, k: int) -> Tensor:
    """In two stages where rows are long: what passes a sampled threshold, then the k largest of that."""
    infinity, bits = INFINITY[x.dtype], as_integers(x)
    if x.shape[1] >= LONG_ROW:
        _, low = sampled_band(x, k)
        reached = Candidates.reaching(bits, low, infinity)
        if reached.counts.min() >= k:
            parts = np.split(reached.keys.numpy(), reached.counts.cumsum(0)[:-1])
            smallest = [np.partition(part, part.size - k)[part.size - k].item() for part in parts]
            cut = torch.tensor(smallest, dtype=torch.int64, device="cpu")
            return _picked(reached, cut, k)
    cut = kth_largest(keys(x), k).flatten().long()
    return _picked(Candidates.reaching(bits, cut, infinity), cut, k)


def _picked(reached: Candidates, cut: Tensor, k: int) -> Tensor:
    """The k largest of each row, whose k-th largest key is `cut` [rows]."""
    chosen = reached.pick(cut, cut + 1, k, spread=False)
    assert chosen is not None, "each row has k entries that reach its k-th largest"
    return chosen


def _banded_native(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor | None:
    """By the first two bounds, which decide unless one of them was a bad guess or many entries tie: then
    None."""
    levels = [
        torch.as_tensor(bound, dtype=torch.int64, device="cpu").flatten().expand(len(x))
        for bound in (*bounds, INFINITY[x.dtype] + 1)
    ]
    if any((lower > upper).any() for lower, upper in pairwise(levels)):
        return None
    reached = Candidates.reaching(as_integers(x), levels[0], INFINITY[x.dtype])
    return reached.pick(levels[0], levels[1], k, spread=True)
