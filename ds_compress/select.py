"""Which k entries of each row are kept.

A selection is a flat tensor of int64 indices into `x.flatten()`, ascending, with the same number of entries in every
row. Larger magnitudes go first, equal ones in the order of their index; nan counts as infinite, so that a selection
from non-finite input holds a non-finite entry.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.indices import positions


def kept_of(length: int, density: float) -> int:
    """How many of `length` entries `density` keeps: at least one; the 1e-9 absorbs the rounding of the product."""
    return min(length, max(1, math.ceil(density * length - 1e-9)))


def rows_of(shape: tuple[int, ...], scope: str) -> tuple[int, int]:
    """(rows, entries per row): a row is one sample (dim 0 counts them) or the whole tensor."""
    numel = torch.Size(shape).numel()
    rows = shape[0] if scope == "sample" and len(shape) > 1 else 1
    return rows, numel // rows if rows else 0


def magnitude(x: Tensor) -> Tensor:
    """|x| with nan as +inf."""
    return x.abs().nan_to_num_(nan=math.inf, posinf=math.inf)


def exact(x: Tensor, k: int) -> Tensor:
    """The k largest magnitudes of each row of `x` [rows, d], ties to the lowest index.

    `torch.topk` leaves open which of the tied entries it returns, so only the k-th value is taken from it.
    """
    rows, d = x.shape
    if k == d or not rows:
        return torch.arange(x.numel(), device=x.device)
    size = magnitude(x)
    threshold = size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, tied = size > threshold, size == threshold
    room = k - above.sum(1, keepdim=True)
    mask = above | (tied & (tied.cumsum(1) <= room))
    return positions(mask.flatten(), rows * k)
