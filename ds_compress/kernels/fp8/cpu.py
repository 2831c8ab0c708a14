"""8-bit floats: `reference` in C++ (fp8.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.fp8 import compiled


def encode_float8(
    values: Tensor, dtype: torch.dtype, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.encode_float8`."""
    if values.dtype in compiled.FLOATS and native.serves("fp8", values.numel()):
        return compiled.encode(values, dtype, out)
    return reference.encode_float8(values, dtype, out)


def decode_float8(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """See `reference.decode_float8`."""
    if out in compiled.FLOATS and native.serves("fp8", codes.numel()):
        return compiled.decode(codes, scales, dtype, out)
    return reference.decode_float8(codes, scales, dtype, out)
