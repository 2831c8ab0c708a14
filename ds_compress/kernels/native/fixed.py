"""Fixed-point codes by fixed.cpp, of widths that make whole bytes: others are packed from bytes by torch."""

from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.bits import pack, packed_size, unpack
from ds_compress.kernels.native.function import FLOATS, SIZE, Buffer, Function

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
    wide: Function("fixed", f"encode_channels_{name}", **_matrix(wide), **_SHAPE, **_BITS, **_CODES)
    for wide, name in FLOATS.items()
}
_decode_channels = {
    wide: Function("fixed", f"decode_channels_{name}", **_CODES, **_SHAPE, **_BITS, **_matrix(wide))
    for wide, name in FLOATS.items()
}
_encode_range = {
    wide: Function("fixed", f"encode_range_{name}", **_row(wide), **_SIZE, **_CODE)
    for wide, name in FLOATS.items()
}
_decode_range = {
    wide: Function("fixed", f"decode_range_{name}", **_CODE, **_SIZE, **_row(wide))
    for wide, name in FLOATS.items()
}


def _width(bits: int) -> int:
    """Of the codes that C++ writes and reads."""
    return bits if 8 % bits == 0 else 8


def encode_channels(x: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode_channels`; of `x`, fp32 or bf16."""
    (rows, channels), width = x.shape, _width(bits)
    packed = torch.empty(channels, packed_size(size, width), dtype=torch.uint8, device="cpu")
    scales = torch.empty(channels, dtype=torch.float32, device="cpu")
    _encode_channels[x.dtype](
        values=x.detach().contiguous(),
        rows=rows,
        channels=channels,
        bits=bits,
        width=width,
        size=size,
        packed=packed,
        scales=scales,
    )
    return packed if width == bits else pack(packed, bits), scales


def decode_channels(packed: Tensor, scales: Tensor, bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_channels`; `dtype` is fp32 or bf16."""
    width, channels = _width(bits), len(scales)
    codes = packed.contiguous() if width == bits else unpack(packed, bits)
    values = torch.empty(rows, channels, dtype=dtype, device="cpu")
    _decode_channels[dtype](
        packed=codes,
        scales=scales.contiguous(),
        rows=rows,
        channels=channels,
        bits=bits,
        width=width,
        size=packed.shape[1] * 8 // bits,
        values=values,
    )
    return values


def encode_range(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode_range`; of `x`, fp32 or bf16."""
    size, width = x.shape[1], _width(bits)
    packed = torch.empty(1, packed_size(size, width), dtype=torch.uint8, device="cpu")
    limits = torch.empty(1, 2, dtype=torch.float32, device="cpu")
    _encode_range[x.dtype](
        values=x.detach().contiguous(), size=size, bits=bits, width=width, packed=packed, limits=limits
    )
    return packed if width == bits else pack(packed, bits), limits


def decode_range(packed: Tensor, limits: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_range`; `dtype` is fp32 or bf16."""
    size, width = packed.shape[1] * 8 // bits, _width(bits)
    codes = packed.contiguous() if width == bits else unpack(packed, bits)
    values = torch.empty(1, size, dtype=dtype, device="cpu")
    _decode_range[dtype](
        packed=codes, limits=limits.contiguous(), size=size, bits=bits, width=width, values=values
    )
    return values
