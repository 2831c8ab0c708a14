"""Fixed-point codes by fixed.cpp, of widths that make whole bytes: others are packed from bytes by torch."""

from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.bits import pack, packed_size, unpack
from ds_compress.kernels.memory import delivered
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
    (rows, channels), width = x.shape, _width(bits)
    packed, scales = _memory(out, (channels, size), bits, (channels,))
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
    return _packed((packed, scales), bits, out)


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


def encode_range(x: Tensor, bits: int, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """See `reference.encode_range`; of `x`, fp32 or bf16."""
    size, width = x.shape[1], _width(bits)
    packed, limits = _memory(out, (1, size), bits, (1, 2))
    _encode_range[x.dtype](
        values=x.detach().contiguous(), size=size, bits=bits, width=width, packed=packed, limits=limits
    )
    return _packed((packed, limits), bits, out)


def decode_range(packed: Tensor, limits: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """See `reference.decode_range`; `dtype` is fp32 or bf16."""
    size, width = packed.shape[1] * 8 // bits, _width(bits)
    codes = packed.contiguous() if width == bits else unpack(packed, bits)
    values = torch.empty(1, size, dtype=dtype, device="cpu")
    _decode_range[dtype](
        packed=codes, limits=limits.contiguous(), size=size, bits=bits, width=width, values=values
    )
    return values
