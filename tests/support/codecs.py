"""Measure, register and compare codecs.

What the tests of codecs measure.

Codecs that are known for the time of one test.

Floats to try kernels with, and how their results are compared.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import CODECS, Context, TensorSpec, build
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.topk.magnitudes import as_integers


def roundtrip(choice, x, **context):
    codec = build(choice)
    parts = codec.encode(x, Context(**context))
    return codec.decode(parts, TensorSpec.of(x), Context(**context))


def bits_per_value(choice, x):
    return 8 * sum(part.nbytes for part in build(choice).encode(x, Context())) / x.numel()


def relative_error(choice, x, **context):
    return ((roundtrip(choice, x, **context).double() - x.double()).norm() / x.double().norm()).item()


def residual_stream():
    """[4, 1024, 1024] like the hidden state of a transformer: Gaussian, with 6 of 1024 channels 20 times
    larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, 1024, generator=generator)
    x[..., torch.randperm(1024, generator=generator)[:6]] *= 20
    return x


@contextmanager
def own_codecs():
    """What is registered inside is forgotten at the end."""
    before = CODECS._classes
    CODECS._classes = dict(before)
    try:
        yield
    finally:
        CODECS._classes = before


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
