"""The k largest magnitudes of each row as a `Selection`, exactly k of them whatever the data."""

import torch
from torch import Tensor

from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.topk.selection import Selection


def exact(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """The k entries of each row of `x` [rows, d] with the largest keys, ties to the lowest index; ascending.
    `values`: see `reference.exact`."""
    rows, d = x.shape
    if k == d or not rows:
        return Selection.at(torch.arange(x.numel(), dtype=torch.int64, device=x.device), x.numel())
    return Selection(x.numel(), rows * k, *kernels(x.device).exact(x, k, values))


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Selection:
    """See `reference.banded`; 0 < k."""
    return Selection(x.numel(), len(x) * k, *kernels(x.device).banded(x, bounds, k))
