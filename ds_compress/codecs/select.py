"""Selection of k entries in each row of a tensor.

Every function takes `x` [rows, d] and returns a `Selection` of entries of `x.flatten()`, in ascending order.
The number of entries per row does not depend on the data, so packets have a static size and contain no
counts. `values` is an optional output buffer for the selected entries (see `select_largest` in
kernels/topk/reference.py). nan and infinity count as the largest magnitude, so a selection from non-finite
input contains a non-finite entry.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.backends import kernels
from ds_compress.kernels.topk.magnitudes import INFINITY, SAMPLE
from ds_compress.kernels.topk.selection import Selection, banded
from ds_compress.kernels.topk.selection import largest as exact


@lru_cache(maxsize=1024)  # successive messages have the same shape
def count_kept(length: int, density: float) -> int:
    """Return how many of `length` entries are selected at `density`, at least one.

    Subtracting 1e-9 absorbs the rounding of the product.
    """
    return min(length, max(1, math.ceil(density * length - 1e-9)))


@lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], row: str) -> tuple[int, int]:
    """Return (rows, entries per row): a row is one sample (an index of dim 0) or the whole tensor."""
    numel = torch.Size(shape).numel()
    rows = shape[0] if row == "sample" and len(shape) > 1 else 1
    return rows, numel // rows if rows else 0


def threshold(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """Select about the k largest of each row by a threshold estimated from a sample, without sorting.

    The sample gives a lower and an upper threshold. Entries above the upper one are selected. Entries between
    the two fill up the selection to k, evenly spaced over the row to avoid a bias. Rows no longer than the
    sample are selected exactly. Source: Deep Gradient Compression, Lin et al., ICLR 2018.
    """
    if x.shape[1] <= SAMPLE or not x.numel():
        return exact(x, k, values)
    high, low = kernels(x.device).sample_bounds(x, k)
    # if more than k entries equal `high`, as in a row of zeros, entries above it still take precedence
    return banded(x, (low, high, high + 1, INFINITY[x.dtype]), k)


def stratified(rows: int, d: int, k: int, generator: torch.Generator) -> Selection:
    """Draw one random entry from each of k segments of every row (see `segment_lengths`)."""
    draw = torch.rand(rows, k, generator=generator, device=generator.device, dtype=torch.float64)
    length = segment_lengths(d, k, generator.device)
    inside = (draw * length).long() + (length.cumsum(0) - length)
    chosen = inside + torch.arange(rows, dtype=torch.int64, device=generator.device).unsqueeze(1) * d
    return Selection.at(chosen.flatten(), rows * d)


def segment_lengths(d: int, k: int, device: torch.device) -> Tensor:
    """Return the lengths, int64 [k], of k segments of a row of d entries; they differ by one at most."""
    ends = torch.arange(k + 1, dtype=torch.int64, device=device) * d
    return ends.div(max(k, 1), rounding_mode="floor").diff()
