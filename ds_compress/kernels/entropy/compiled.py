"""Entropy coding by entropy.cpp."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import FINER, KEYS, LEVELS, MOST_CONTEXTS, STEPS, TOTAL, Frame, tables
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import FLAG, SIZE, Buffer, Function

FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes that `encode` takes and `decode` makes."""

_COPIES = 4  # of the histogram
_COUNTS = 4 * KEYS + 2  # of each context
_SPACE = 2 * KEYS * _COPIES + MOST_CONTEXTS * _COUNTS
_AT_ONCE = 2  # blocks

_FRAME: dict[str, Any] = {
    "numel": range(1, 1 << 32),
    "size": SIZE,
    "lanes": range(1, 33),
    "length": SIZE,
    "blocks": SIZE,
    "contexts": range(1, MOST_CONTEXTS + 1),
    "ends": Buffer((torch.int64,), ("contexts",)),
}
_CODE = Buffer((torch.int16,), ("size",))

ENCODE: dict[str, Any] = {
    "values": Buffer(FLOATS, ("numel",), by="bf16"),
    "bf16": FLAG,
    **_FRAME,
    "first": Buffer((torch.int32,), (FINER, LEVELS[-1] + 1)),
    "units": Buffer((torch.int64,), (STEPS,)),
    "cost": Buffer((torch.int32,), (TOTAL + 1,)),
    "keys": Buffer((torch.int16,), ("numel",)),
    "space": Buffer((torch.int32,), (_SPACE,)),
    "scratch": Buffer((torch.int16,), (_AT_ONCE, "length")),
    "code": _CODE,
}
"""The arguments of a function that encodes."""

DECODE: dict[str, Any] = {
    "code": _CODE,
    **_FRAME,
    "steps": Buffer((torch.float32,), (STEPS,)),
    "q": Buffer((torch.int8,), ("numel",)),
    "values": Buffer(FLOATS, ("numel",), by="bf16"),
    "bf16": FLAG,
}
"""The arguments of a function that decodes."""

_encode = Function("entropy", "encode_entropy", **ENCODE)
_decode = Function("entropy", "decode_entropy", **DECODE)


def encode(values: Tensor, frame: Frame) -> Tensor:
    """See `reference.encode_entropy`; of `values`, fp32 or bf16."""
    code = torch.empty(frame.words, dtype=torch.int16, device="cpu")
    _encode(**to_encode(values, frame), code=code)
    return code


def decode(code: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """See `reference.decode_entropy`; `dtype` is fp32 or bf16. Values that are not valid are anything."""
    arguments = to_decode(code, frame, dtype)
    valid = _decode(**arguments)
    return arguments["values"], bool(valid)


def to_encode(values: Tensor, frame: Frame) -> dict[str, Any]:
    """The arguments of ENCODE but for `code`."""
    made = tables(torch.device("cpu"))
    return {
        "values": values.contiguous(),
        "bf16": values.dtype == torch.bfloat16,
        **_numbers(frame),
        "first": made.first,
        "units": made.units,
        "cost": made.cost,
        "keys": scratch("entropy.keys", (frame.numel,), torch.int16),
        "space": scratch("entropy.space", (_SPACE,), torch.int32),
        "scratch": scratch("entropy.words", (_AT_ONCE, frame.length), torch.int16),
    }


def to_decode(code: Tensor, frame: Frame, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of DECODE, new memory for `values` among them."""
    return {
        "code": code.contiguous(),
        **_numbers(frame),
        "steps": tables(torch.device("cpu")).step,
        "q": scratch("entropy.q", (frame.numel,), torch.int8),
        "values": torch.empty(frame.numel, dtype=dtype, device="cpu"),
        "bf16": dtype == torch.bfloat16,
    }


@lru_cache(maxsize=1024)
def _numbers(frame: Frame) -> dict[str, Any]:
    return {
        "numel": frame.numel,
        "size": frame.words,
        "lanes": frame.lanes,
        "length": frame.length,
        "blocks": frame.blocks,
        "contexts": frame.contexts,
        "ends": torch.tensor(frame.ends, dtype=torch.int64, device="cpu"),
    }
