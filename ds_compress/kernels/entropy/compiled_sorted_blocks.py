"""Entropy coding of sorted units, by entropy.cpp."""

from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.entropy.compiled import DECODE, ENCODE, FLOATS, to_decode, to_encode
from ds_compress.kernels.entropy.format import Frame
from ds_compress.kernels.entropy.sorted_blocks import CLASSES, PER_WORD, Units
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import FLAG, SIZE, Buffer, Function

__all__ = ["FLOATS", "decode", "encode"]

_UNITS: dict[str, Any] = {
    "count": range(CLASSES, 1 << 31),
    "rest": SIZE,
    "columns": FLAG,
    "order": Buffer((torch.int32,), (2, "count")),
    "classes": Buffer((torch.int16,), ("count",), per=PER_WORD),
}
_encode = Function("entropy", "encode_units", **ENCODE, **_UNITS)
_decode = Function("entropy", "decode_units", **DECODE, **_UNITS)


def encode(values: Tensor, frame: Frame, units: Units) -> Tensor:
    """See `reference.encode_units`; of `values`, fp32 or bf16."""
    words = torch.empty(frame.words + units.words, dtype=torch.int16, device="cpu")
    code, classes = words[: frame.words], words[frame.words :]
    _encode(**to_encode(values, frame), code=code, **_numbers(frame, units), classes=classes)
    return words


def decode(words: Tensor, frame: Frame, units: Units, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """See `reference.decode_units`; `dtype` is fp32 or bf16. Values that are not valid are anything."""
    words = words.contiguous()
    arguments = to_decode(words[: frame.words], frame, dtype)
    valid = _decode(**arguments, **_numbers(frame, units), classes=words[frame.words :])
    return arguments["values"], bool(valid)


def _numbers(frame: Frame, units: Units) -> dict[str, Any]:
    return {
        "count": units.count,
        "rest": frame.numel - units.count * units.size,
        "columns": units.columns,
        "order": scratch("entropy.order", (2, units.count), torch.int32),
    }
