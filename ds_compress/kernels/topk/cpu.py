"""Selections of long tensors in C++ (kth_largest.cpp, selection.cpp)."""

from itertools import pairwise

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.topk import compiled_kth_largest as compiled
from ds_compress.kernels.topk.compiled_selection import Candidates
from ds_compress.kernels.topk.cpu_bitstring import positions
from ds_compress.kernels.topk.cpu_small_ops import count_true, kth_largest
from ds_compress.kernels.topk.keys import INFINITY, as_integers
from ds_compress.kernels.topk.reference import Steps, banded_by, exact_by, sampled_band_by

_STEPS = Steps(kth_largest, count_true, positions)


def exact(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `reference.exact`."""
    if native.serves("kth_largest", x.numel()):
        return compiled.exact(x, k, values)
    return exact_by(_STEPS, x, k), None


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> tuple[Tensor, Tensor | None]:
    """See `reference.banded`."""
    chosen = _banded(x, bounds, k) if native.serves("selection", x.numel()) else None
    return banded_by(_STEPS, x, bounds, k) if chosen is None else chosen, None


def sampled_band(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `reference.sampled_band`."""
    return sampled_band_by(_STEPS, x, k)


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
    return reached.pick(levels[0], levels[1], k)
