"""Floats of fewer bits on the CPU by fp8.cpp."""

from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.fp8 import reference
from ds_compress.kernels.memory import empty_template
from ds_compress.kernels.native.function import FLOATS, SIZE, Buffer, Call, Function, for_each_dtype

__all__ = reference.__all__

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_SHAPE = {"groups": SIZE, "size": SIZE}
_CODES = Buffer((torch.uint8,), ("groups", "size"))
_SCALES = Buffer((torch.float32,), ("groups",))
_encode = {
    dtype: for_each_dtype(
        *("fp8", f"encode_{name}_", FLOATS, "groups"),
        values=("groups", "size"),
        **_SHAPE,
        largest=float,
        codes=_CODES,
        scales=_SCALES,
    )
    for dtype, name in _FORMATS.items()
}
_decode = {
    dtype: for_each_dtype(
        *("fp8", f"decode_{name}_", FLOATS, "groups"),
        codes=_CODES,
        scales=_SCALES,
        **_SHAPE,
        values=("groups", "size"),
    )
    for dtype, name in _FORMATS.items()
}


_to_bf16 = Function(
    "fp8",
    "to_bf16",
    "n",
    values=Buffer((torch.float32,), ("n",)),
    n=SIZE,
    rounded=Buffer((torch.bfloat16,), ("n",)),
)


def cast(x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if x.dtype != torch.float32 or dtype != torch.bfloat16 or not native.serves(x.numel()):
        return reference.cast(x, dtype, out)
    rounded = torch.empty_like(empty_template(x.shape, dtype)) if out is None else out
    _caster(x.numel())(x.detach().contiguous(), rounded)
    return rounded


@lru_cache  # most messages have the shape of the one before
def _caster(n: int) -> Call:
    return _to_bf16.bind(n=n)


@lru_cache  # most messages have the shape of the one before
def _encoder(dtype: torch.dtype, wide: torch.dtype, groups: int, size: int) -> Call:
    return _encode[dtype][wide].bind(groups=groups, size=size, largest=torch.finfo(dtype).max)


@lru_cache
def _decoder(dtype: torch.dtype, wide: torch.dtype, groups: int, size: int) -> Call:
    return _decode[dtype][wide].bind(groups=groups, size=size)


def encode_fp8(
    values: Tensor, dtype: torch.dtype, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.encode_fp8`."""
    if values.dtype not in FLOATS or not native.serves(values.numel()):
        return reference.encode_fp8(values, dtype, out)
    groups, size = values.shape
    codes, scales = out or (
        torch.empty(values.shape, dtype=torch.uint8, device="cpu"),
        torch.empty(groups, dtype=torch.float32, device="cpu"),
    )
    _encoder(dtype, values.dtype, groups, size)(values.contiguous(), codes, scales)
    return codes, scales


def decode_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """See `reference.decode_fp8`."""
    if out not in FLOATS or not native.serves(codes.numel()):
        return reference.decode_fp8(codes, scales, dtype, out)
    groups, size = codes.shape
    values = torch.empty_like(empty_template((groups, size), out))
    _decoder(dtype, out, groups, size)(codes.contiguous(), scales.contiguous(), values)
    return values
