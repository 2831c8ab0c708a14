"""Floats to try kernels with, and how their results are compared."""

import torch
from torch import Tensor

from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.topk.magnitudes import as_integers


def any_grid(
    bits: int, symmetric: bool, scale_dtype: torch.dtype, hadamard: bool, size: int, seed: int
) -> Grid:
    """A grid for groups of `size`, rotated only where they can be; that for normal values in every third case
    that allows it."""
    whole = not size & (size - 1)
    gaussian = whole and bits <= 4 and seed % 3 == 0
    return Grid(bits, symmetric or gaussian, scale_dtype, hadamard and whole, seed, gaussian)


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
