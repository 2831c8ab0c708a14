"""8-bit floats by float8.cpp."""

from functools import cache

import torch
from torch import Tensor

from ds_compress.kernels.native.function import SIZE, Buffer, Function

FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The dtypes that `encode` takes and `decode` makes, by their name in float8.cpp."""

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

_SHAPE = {"groups": SIZE, "size": SIZE}
_CODES = Buffer((torch.uint8,), ("groups", "size"))
_SCALES = Buffer((torch.float32,), ("groups",))

_encode = {
    (dtype, wide): Function(
        "float8",
        f"encode_{name}_{FLOATS[wide]}",
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
    wide: Function(
        "float8",
        f"decode_{name}",
        codes=_CODES,
        scales=_SCALES,
        table=Buffer((torch.float32,), (256,)),
        **_SHAPE,
        values=Buffer((wide,), ("groups", "size")),
    )
    for wide, name in FLOATS.items()
}


def encode(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [groups, size], of `values`, fp32 or bf16 [groups, size], as `dtype`; and scales, fp32
    [groups]."""
    groups, size = values.shape
    codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
    scales = torch.empty(groups, dtype=torch.float32, device="cpu")
    _encode[dtype, values.dtype](
        values=values.detach().contiguous(),
        groups=groups,
        size=size,
        largest=torch.finfo(dtype).max,
        codes=codes,
        scales=scales,
    )
    return codes, scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The values, fp32 or bf16 [groups, size], of `codes`, which are of `dtype`."""
    groups, size = codes.shape
    values = torch.empty(codes.shape, dtype=out, device="cpu")
    _decode[out](
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        table=_table(dtype),
        groups=groups,
        size=size,
        values=values,
    )
    return values


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """fp32 [256]: what the codes of an 8-bit float stand for."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
