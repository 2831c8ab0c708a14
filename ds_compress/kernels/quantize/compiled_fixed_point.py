"""Fixed-point codes by fixed.cpp, of widths that make whole bytes: others are packed from bytes by torch."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.memory import delivered, unmade
from ds_compress.kernels.native.function import FLOATS, SIZE, Buffer, Call, Function
from ds_compress.kernels.quantize.bits import pack, packed_size, unpack

_BITS: dict[str, Any] = {"bits": range(1, 9), "width": range(1, 9), "size": range(0, 1 << 62, 8)}
_CODES: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("channels", "size", "width"), per=8),
    "scales": Buffer((torch.float32,), ("channels",)),
}
_CODE: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("size", "width"), per=8),
    "limits": Buffer((torch.float32,), (2,)),
}
_SHAPE: dict[str, Any] = {"rows": range(1, 1 << 62), "channels": SIZE}


def _matrix(dtype: torch.dtype) -> dict[str, Any]:
    return {"values": Buffer((dtype,), ("rows", "channels"))}


def _row(dtype: torch.dtype) -> dict[str, Any]:
    return {"values": Buffer((dtype,), ("size",))}


_SIZE = {"size": range(8, 1 << 62, 8), "bits": range(1, 9), "width": range(1, 9)}
_encode_channels = {
    wide: Function("fixed_point", f"encode_channels_{name}", **_matrix(wide), **_SHAPE, **_BITS, **_CODES)
    for wide, name in FLOATS.items()
}
_decode_channels = {
    wide: Function("fixed_point", f"decode_channels_{name}", **_CODES, **_SHAPE, **_BITS, **_matrix(wide))
    for wide, name in FLOATS.items()
}
_encode_range = {
    wide: Function("fixed_point", f"encode_range_{name}", **_row(wide), **_SIZE, **_CODE)
    for wide, name in FLOATS.items()
}
_decode_range = {
    wide: Function("fixed_point", f"decode_range_{name}", **_CODE, **_SIZE, **_row(wide))
    for wide, name in FLOATS.items()
}


@lru_cache  # a message has the shape of the one before
def _channels(wide: torch.dtype, rows: int, channels: int, bits: int, size: int) -> tuple[Call, Call]:
    known = {"rows": rows, "channels": channels, "bits": bits, "width": _width(bits), "size": size}
    return _encode_channels[wide].given(**known), _decode_channels[wide].given(**known)


@lru_cache
def _range(wide: torch.dtype, size: int, bits: int) -> tuple[Call, Call]:
    known = {"size": size, "bits": bits, "width": _width(bits)}
    return _encode_range[wide].given(**known), _decode_range[wide].given(**known)


def _width(bits: int) -> int:
    """Of the codes that C++ writes and reads."""
    return bits if 8 % bits == 0 else 8


def _memory(
    out: tuple[Tensor, ...] | None, shape: tuple[int, int], bits: int, fixed: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """For what C++ makes: codes [groups, values per group], and fp32 of the shape `fixed`."""
    (groups, size), width = shape, _width(bits)
    if out is not None and width == bits:
        return out[0], out[1]
    packed = torch.empty(groups, packed_size(size, width), dtype=torch.uint8, device="cpu")
    return packed, torch.empty(fixed, dtype=torch.float32, device="cpu")


def _packed(made: tuple[Tensor, Tensor], bits: int, out: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """What C++ `made`, with codes of `bits`, in `out` where there is some."""
    return made if _width(bits) == bits else delivered((pack(made[0], bits), made[1]), out)


def encode_channels(
    x: Tensor, bits: int, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.encode_channels`; of `x`, fp32 or bf16."""
    rows, channels = x.shape
    made = _memory(out, (channels, size), bits, (channels,))
    _channels(x.dtype, rows, channels, bits, size)[0](x.contiguous(), *made)
    return _packed(made, bits, out)


def decode_channels(packed: Tensor, scales: Tensor, bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_channels`; `dtype` is fp32 or bf16."""
    channels, size = len(scales), packed.shape[1] * 8 // bits
    codes = packed.contiguous() if _width(bits) == bits else unpack(packed, bits)
    values = torch.empty_like(unmade((rows, channels), dtype))
    _channels(dtype, rows, channels, bits, size)[1](codes, scales.contiguous(), values)
    return values


def encode_range(x: Tensor, bits: int, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """See `reference.encode_range`; of `x`, fp32 or bf16."""
    size = x.shape[1]
    made = _memory(out, (1, size), bits, (1, 2))
    _range(x.dtype, size, bits)[0](x.contiguous(), *made)
    return _packed(made, bits, out)


def decode_range(packed: Tensor, limits: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_range`; `dtype` is fp32 or bf16."""
    size = packed.shape[1] * 8 // bits
    codes = packed.contiguous() if _width(bits) == bits else unpack(packed, bits)
    values = torch.empty_like(unmade((1, size), dtype))
    _range(dtype, size, bits)[1](codes, limits.contiguous(), values)
    return values
