"""8-bit floats by float8.cpp."""

from functools import cache

import torch
from torch import Tensor

from ds_compress.kernels.native import call

FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The dtypes that `encode` takes and `decode` makes, by their name in float8.cpp."""

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def encode(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [groups, size], of `values`, fp32 or bf16 [groups, size], as `dtype`; and scales, fp32
    [groups]."""
    codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
    scale = torch.empty(len(values), dtype=torch.float32, device="cpu")
    name = f"encode_{_FORMATS[dtype]}_{FLOATS[values.dtype]}"
    call("float8", name, values.contiguous(), *values.shape, torch.finfo(dtype).max, codes, scale)
    return codes, scale


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The values, fp32 or bf16 [groups, size], of `codes`, which are of `dtype`."""
    values = torch.empty(codes.shape, dtype=out, device="cpu")
    parts = codes.contiguous(), scale.contiguous(), _values(dtype)
    call("float8", f"decode_{FLOATS[out]}", *parts, *codes.shape, values)
    return values


@cache
def _values(dtype: torch.dtype) -> Tensor:
    """fp32 [256]: what the codes of an 8-bit float stand for."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
