"""Magnitudes as integers: the bits of a float without its sign grow with its magnitude, so one set of
functions serves all dtypes, and nan is nothing special."""

import math

import torch
from torch import Tensor

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INFINITY: dict[torch.dtype, int] = {
    dtype: int(torch.tensor(math.inf, dtype=dtype, device="cpu").view(_INTEGER[dtype.itemsize]).item())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The key of infinity: no key is larger."""


def keys(x: Tensor) -> Tensor:
    """Integers of the size of x's elements that order as |x| does; nan has the key of infinity."""
    bits = as_integers(x)
    return (bits & torch.iinfo(bits.dtype).max).clamp_(max=INFINITY[x.dtype])


def as_integers(x: Tensor) -> Tensor:
    """The bits of x's elements, as signed integers of their size."""
    return x.contiguous().view(_INTEGER[x.element_size()])
