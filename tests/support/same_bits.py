"""Floats to try kernels with, and how their results are compared."""

import torch
from torch import Tensor

from ds_compress.kernels.keys import as_integers


def values(n: int, size: int, dtype: torch.dtype, seed: int, special: float | None = None) -> Tensor:
    """[n, size]: groups of very different magnitudes; some constant, some zero of either sign, some
    subnormal, and, if given, some holding `special`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=generator) * torch.exp2(torch.randn(n, 1, generator=generator) * 20)
    x[::7] = x[::7, :1]
    x[::11] = 0
    x[::11, seed % size] = -0.0
    x[::13] *= 1e-30
    x[::19] *= 1e-38
    if special is not None:
        x[::17, seed % size] = special
    return x.to(dtype)


def assert_same_bits(ours, theirs) -> None:
    """Tensors of the same dtypes, shapes and bits, but for those of nan, which are nan on both sides."""
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        if mine.is_floating_point():
            assert torch.equal(mine.isnan(), its.isnan())
            mine, its = (as_integers(part.masked_fill(part.isnan(), 0)) for part in (mine, its))
        assert torch.equal(mine, its)
