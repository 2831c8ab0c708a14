"""Bytes sorted by their place: `reference` in C++ (byte_shuffle.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.lossless import compiled


def sort_bytes(x: Tensor) -> Tensor:
    """See `reference.sort_bytes`."""
    if x.dtype in compiled.FLOATS and native.serves("byte_shuffle", x.numel()):
        return compiled.sort_bytes(x)
    return reference.sort_bytes(x)


def join_bytes(planes: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """See `reference.join_bytes`."""
    if dtype in compiled.FLOATS and native.serves("byte_shuffle", planes.numel() // dtype.itemsize):
        return compiled.join_bytes(planes, dtype, shape)
    return reference.join_bytes(planes, dtype, shape)
