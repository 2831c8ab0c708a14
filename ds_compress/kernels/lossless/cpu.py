"""Byte shuffle on the CPU by byte_shuffle.cpp."""

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.lossless import reference
from ds_compress.kernels.memory import empty_template
from ds_compress.kernels.native.function import SIZE, Buffer, Function

__all__ = reference.__all__

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_shuffle = {
    dtype: Function(
        "byte_shuffle",
        f"byte_shuffle{8 * dtype.itemsize}",
        x=Buffer((dtype,), ("n",)),
        n=SIZE,
        shuffled=Buffer((torch.uint8,), ("n", dtype.itemsize)),
    )
    for dtype in _DTYPES
}
_unshuffle = {
    dtype: Function(
        "byte_shuffle",
        f"byte_unshuffle{8 * dtype.itemsize}",
        shuffled=Buffer((torch.uint8,), ("n", dtype.itemsize)),
        n=SIZE,
        y=Buffer((dtype,), ("n",)),
    )
    for dtype in _DTYPES
}


def byte_shuffle(x: Tensor) -> Tensor:
    n = x.numel()
    if x.dtype not in _DTYPES or not native.serves(n):
        return reference.byte_shuffle(x)
    shuffled = torch.empty_like(empty_template((n * x.itemsize,), torch.uint8))
    _shuffle[x.dtype].bind(n=n)(x, shuffled)
    return shuffled


def byte_unshuffle(shuffled: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype not in _DTYPES or not native.serves(shuffled.numel() // dtype.itemsize):
        return reference.byte_unshuffle(shuffled, dtype, shape)
    values = torch.empty_like(empty_template(shape, dtype))
    _unshuffle[dtype].bind(n=values.numel())(shuffled, values)
    return values
