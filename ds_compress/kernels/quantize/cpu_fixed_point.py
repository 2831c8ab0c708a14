"""Fixed-point codes: `reference` in C++ (fixed_point.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.quantize import compiled_fixed_point as compiled

FEW = 8
"""Channels from which on a step of C++, which takes a row at a time, is worth it."""


def encode_channels(
    x: Tensor, bits: int, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.encode_channels`."""
    if x.shape[1] >= FEW and native.serves("fixed_point", x.numel()):
        return compiled.encode_channels(x if x.dtype in compiled.FLOATS else x.float(), bits, size, out)
    return reference.encode_channels(x, bits, size, out)


def decode_channels(packed: Tensor, scale: Tensor, bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_channels`."""
    if len(scale) >= FEW and native.serves("fixed_point", rows * len(scale)):
        made = dtype if dtype in compiled.FLOATS else torch.float32
        return compiled.decode_channels(packed, scale, bits, rows, made).to(dtype)
    return reference.decode_channels(packed, scale, bits, rows, dtype)


def encode_range(x: Tensor, bits: int, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """See `reference.encode_range`."""
    if len(x) and native.serves("fixed_point", x.numel()):
        return compiled.encode_range(x if x.dtype in compiled.FLOATS else x.float(), bits, out)
    return reference.encode_range(x, bits, out)


def decode_range(packed: Tensor, limits: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_range`."""
    if len(packed) and native.serves("fixed_point", packed.numel() * 8 // bits):
        made = dtype if dtype in compiled.FLOATS else torch.float32
        return compiled.decode_range(packed, limits, bits, made).to(dtype)
    return reference.decode_range(packed, limits, bits, dtype)
