"""The bytes of numbers, sorted by their place, by planes.cpp."""

from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.memory import unmade
from ds_compress.kernels.native.function import SIZE, Buffer, Call, Function

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Whose bytes are sorted."""

_sort = {
    dtype: Function(
        "byte_shuffle",
        f"sort_bytes{8 * dtype.itemsize}",
        x=Buffer((dtype,), ("n",)),
        n=SIZE,
        planes=Buffer((torch.uint8,), ("n", dtype.itemsize)),
    )
    for dtype in FLOATS
}
_join = {
    dtype: Function(
        "byte_shuffle",
        f"join_bytes{8 * dtype.itemsize}",
        planes=Buffer((torch.uint8,), ("n", dtype.itemsize)),
        n=SIZE,
        y=Buffer((dtype,), ("n",)),
    )
    for dtype in FLOATS
}


@lru_cache  # a message has the shape of the one before
def _calls(dtype: torch.dtype, n: int) -> tuple[Call, Call]:
    return _sort[dtype].given(n=n), _join[dtype].given(n=n)


def sort_bytes(x: Tensor) -> Tensor:
    """See `reference.sort_bytes`; of FLOATS."""
    n = x.numel()
    planes = torch.empty_like(unmade((n * x.itemsize,), torch.uint8))
    _calls(x.dtype, n)[0](x, planes)
    return planes


def join_bytes(planes: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """See `reference.join_bytes`; `dtype` is one of FLOATS."""
    template = unmade(shape, dtype)
    values = torch.empty_like(template)
    _calls(dtype, template.numel())[1](planes, values)
    return values
