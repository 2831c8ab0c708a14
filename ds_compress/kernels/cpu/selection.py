"""Selections of long tensors in C++ (native/selection.cpp), which looks at the entries that reach a bound."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.cpu.bitstring import positions
from ds_compress.kernels.cpu.steps import count_true, kth_largest
from ds_compress.kernels.keys import INFINITY, as_integers, keys
from ds_compress.kernels.native.selection import Candidates
from ds_compress.kernels.reference.selection import Steps, banded_by, exact_by, sampled_band_by

LONG_ROW = 1 << 17
"""Above this row length the k-th largest is looked for among the entries that pass a threshold taken from a
sample."""

_STEPS = Steps(kth_largest, count_true, positions)


def exact(x: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """See `reference.exact`."""
    compiled = native.serves("selection", x.numel())
    return _exact(x, k) if compiled else exact_by(_STEPS, x, k), None


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> tuple[Tensor, Tensor | None]:
    """See `reference.banded`."""
    chosen = _banded(x, bounds, k) if native.serves("selection", x.numel()) else None
    return banded_by(_STEPS, x, bounds, k) if chosen is None else chosen, None


def sampled_band(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `reference.sampled_band`."""
    return sampled_band_by(_STEPS, x, k)


def _exact(x: Tensor, k: int) -> Tensor:
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


def _banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor | None:
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
