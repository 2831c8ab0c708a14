"""Which k entries of each row are kept.

Every function takes `x` [rows, d] and returns a `Selection` of entries of `x.flatten()`, ascending, with the
same number of entries in every row whatever the data, so that packets have a static size and carry no counts.
`values`: memory for the kept entries, where they are made on the way (see `select_largest` in
kernels/topk/reference.py). nan and infinity count as the largest magnitude: a selection from non-finite input
holds a non-finite entry.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.backends import kernels
from ds_compress.kernels.topk.magnitudes import INFINITY, SAMPLE, keys
from ds_compress.kernels.topk.selection import Selection, banded, largest, sidco_thresholds


@lru_cache(maxsize=1024)  # a message has the shape of the one before
def kept_of(length: int, density: float) -> int:
    """How many of `length` entries `density` keeps: at least one; the 1e-9 absorbs the rounding of the
    product."""
    return min(length, max(1, math.ceil(density * length - 1e-9)))


@lru_cache(maxsize=1024)
def kept_in_blocks(length: int, density: float, block: int) -> int:
    """How many of `length` entries `blockwise` keeps."""
    return length // block * kept_of(block, density) + kept_of(length % block, density)


@lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], row: str) -> tuple[int, int]:
    """(rows, entries per row): a row is one sample (dim 0 counts them) or the whole tensor."""
    numel = torch.Size(shape).numel()
    rows = shape[0] if row == "sample" and len(shape) > 1 else 1
    return rows, numel // rows if rows else 0


def exact(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """The k largest magnitudes of each row, equal ones in the order of their index."""
    return largest(x, k, values)


def threshold(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """About the k largest of each row: those above a threshold taken from a sample, without sorting all (as
    in Deep Gradient Compression, Lin et al., ICLR 2018).

    The sample gives a band for the threshold. What lies above the band is kept; the other places go to
    entries of the band, evenly spaced over the row so that no part of it is favoured. Rows no longer than the
    sample are exact.
    """
    if x.shape[1] <= SAMPLE or not x.numel():
        return largest(x, k, values)
    high, low = kernels(x.device).sample_bounds(x, k)
    # where more than k entries tie with `high`, as in a row of zeros, those above it still go first
    return banded(x, (low, high, high + 1, INFINITY[x.dtype]), k)


def sidco(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """About the k largest of each row, by thresholds fitted to the distribution of |x| (see
    `sidco_thresholds`).

    What lies above the upper fitted threshold is kept, the other places go evenly spaced to entries between
    the two. Where the best fit of some row keeps less than 0.8 k or more than 1.25 k, the selection is exact:
    looking at that costs a synchronisation with the GPU.
    """
    if not x.numel():
        return largest(x, k, values)
    high, low, achieved = sidco_thresholds(x, k)
    if not bool(((achieved >= 0.8 * k) & (achieved <= 1.25 * k)).all()):
        return largest(x, k, values)
    low, high = keys(low.to(x.dtype)), keys(high.to(x.dtype))
    return banded(x, (low, high, INFINITY[x.dtype]), k)


def blockwise(x: Tensor, density: float, block: int, values: Tensor | None = None) -> Selection:
    """The largest of each block of `block` entries of a row (the last one may be shorter), at least one per
    block."""
    rows, d = x.shape
    if not x.numel():
        return largest(x, 0)
    block = min(block, d)
    if d % block == 0:
        return largest(x.reshape(-1, block), kept_of(block, density), values)
    whole = d // block * block
    places = []
    for start, length, width in ((0, whole, block), (whole, d - whole, d - whole)):
        blocks = x[:, start : start + length].reshape(-1, width)
        inside = largest(blocks, kept_of(width, density)).indices.view(rows, -1)
        row = torch.arange(rows, dtype=torch.int64, device=x.device).unsqueeze(1)
        places.append(inside + (row * (d - length) + start))
    return Selection.at(torch.cat(places, dim=1).flatten(), x.numel())


def stratified(rows: int, d: int, k: int, generator: torch.Generator) -> Selection:
    """A random selection: each row is cut in k stretches (`stretches`), and one entry of each is drawn."""
    draw = torch.rand(rows, k, generator=generator, device=generator.device, dtype=torch.float64)
    length = stretches(d, k, generator.device)
    inside = (draw * length).long() + (length.cumsum(0) - length)
    chosen = inside + torch.arange(rows, dtype=torch.int64, device=generator.device).unsqueeze(1) * d
    return Selection.at(chosen.flatten(), rows * d)


def stretches(d: int, k: int, device: torch.device) -> Tensor:
    """Lengths, int64 [k], of k stretches that make up a row of d entries and differ by one at most."""
    ends = torch.arange(k + 1, dtype=torch.int64, device=device) * d
    return ends.div(max(k, 1), rounding_mode="floor").diff()
