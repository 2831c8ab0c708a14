"""8-bit floats by float8.cpp."""

from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.memory import unmade
from ds_compress.kernels.native.function import FLOATS, SIZE, Buffer, Call, Function

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

_SHAPE = {"groups": SIZE, "size": SIZE}
_CODES = Buffer((torch.uint8,), ("groups", "size"))
_SCALES = Buffer((torch.float32,), ("groups",))

_encode = {
    (dtype, wide): Function(
        "fp8",
        f"encode_{name}_{FLOATS[wide]}",
        "groups",
        values=Buffer((wide,), ("groups", "size")),
        **_SHAPE,
        largest=float,
        codes=_CODES,
        scales=_SCALES,
    )
    for dtype, name in _FORMATS.items()
    for wide in FLOATS
}
_decode = {
    (dtype, wide): Function(
        "fp8",
        f"decode_{name}_{FLOATS[wide]}",
        "groups",
        codes=_CODES,
        scales=_SCALES,
        **_SHAPE,
        values=Buffer((wide,), ("groups", "size")),
    )
    for dtype, name in _FORMATS.items()
    for wide in FLOATS
}


@lru_cache  # a message has the shape of the one before
def _encoder(dtype: torch.dtype, wide: torch.dtype, groups: int, size: int) -> Call:
    return _encode[dtype, wide].given(groups=groups, size=size, largest=torch.finfo(dtype).max)


@lru_cache
def _decoder(dtype: torch.dtype, wide: torch.dtype, groups: int, size: int) -> Call:
    return _decode[dtype, wide].given(groups=groups, size=size)


def encode(values: Tensor, dtype: torch.dtype, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """See `reference.encode_float8`; of `values`, fp32 or bf16."""
    groups, size = values.shape
    codes, scales = out or (
        torch.empty(values.shape, dtype=torch.uint8, device="cpu"),
        torch.empty(groups, dtype=torch.float32, device="cpu"),
    )
    _encoder(dtype, values.dtype, groups, size)(values.contiguous(), codes, scales)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The values, fp32 or bf16 [groups, size], of `codes`, which are of `dtype`."""
    groups, size = codes.shape
    values = torch.empty_like(unmade((groups, size), out))
    _decoder(dtype, out, groups, size)(codes.contiguous(), scales.contiguous(), values)
    return values
