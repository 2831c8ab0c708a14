"""Magnitudes as integer keys, and which entries of a long row are sampled.

The bits of a float without its sign grow with its magnitude. So one set of functions serves all dtypes, and
nan is no special case.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INFINITY: dict[torch.dtype, int] = {
    dtype: int(torch.tensor(math.inf, dtype=dtype, device="cpu").view(_INTEGER[dtype.itemsize]).item())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The key of infinity; no key is larger."""

SAMPLE = 1 << 14
"""Entries of a sample, at least."""


def keys(x: Tensor) -> Tensor:
    """Return integers of the size of x's elements that order as |x| does; nan has the key of infinity."""
    bits = as_integers(x)
    return (bits & torch.iinfo(bits.dtype).max).clamp_(max=INFINITY[x.dtype])


def as_integers(x: Tensor) -> Tensor:
    """Return the bits of x's elements as signed integers of their size."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def sample_plan(d: int, k: int, least: int | None = None) -> tuple[int, int, int]:
    """Plan a sample of a row of `d` entries that brackets its k-th largest.

    The number of sampled entries among the k largest is about Poisson, and the ranks lie three of its
    standard deviations to each side. The stride shares no factor with d, hence none with the last dimension:
    otherwise the sample would see some channels only, and outlier channels are common.

    Args:
        least: entries of the sample at least; SAMPLE if None.

    Returns:
        (stride, high, low): every stride-th entry is sampled. The k-th largest of the row almost surely lies
        between the samples of these two ranks, 1 being the largest.
    """
    stride = max(1, d // (least or SAMPLE))
    while math.gcd(stride, d) > 1:
        stride += 1
    length = -(-d // stride)
    expected = k * length / d
    margin = 3 * math.sqrt(expected) + 1
    return stride, max(1, int(expected - margin)), min(length, math.ceil(expected + margin))


@lru_cache(maxsize=1024)  # most messages have the shape of the one before
def first_look(d: int, k: int) -> tuple[int, int, int]:
    """Return `sample_plan` for a smaller sample, about four of whose entries are among the k largest. It only
    says where to search first, and ranking it costs no more time than it saves."""
    return sample_plan(d, k, min(SAMPLE, max(min(d // 16, 1 << 10), d // 64, 4 * d // k)))
