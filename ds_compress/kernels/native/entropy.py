"""Entropy coding by entropy.cpp."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.entropy import (
    FINER,
    KEYS,
    LEVELS,
    MOST_CONTEXTS,
    STEPS,
    TOTAL,
    Frame,
    tables,
)
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import FLAG, SIZE, Buffer, Function

FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes that `encode` takes and `decode` makes."""

_COPIES = 4  # of the histogram
_SPACE = 2 * KEYS * _COPIES
_COUNTS = 4 * KEYS + 2  # of each context

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

_encode = Function(
    "entropy",
    "encode_entropy",
    values=Buffer(FLOATS, ("numel",), by="bf16"),
    bf16=FLAG,
    **_FRAME,
    first=Buffer((torch.int32,), (FINER, LEVELS[-1] + 1)),
    units=Buffer((torch.int64,), (STEPS,)),
    cost=Buffer((torch.int32,), (TOTAL + 1,)),
    keys=Buffer((torch.int16,), ("numel",)),
    space=Buffer((torch.int32,), (_SPACE + MOST_CONTEXTS * _COUNTS,)),
    scratch=Buffer((torch.int16,), ("length",)),
    code=_CODE,
)
_decode = Function(
    "entropy",
    "decode_entropy",
    code=_CODE,
    **_FRAME,
    steps=Buffer((torch.float32,), (STEPS,)),
    values=Buffer(FLOATS, ("numel",), by="bf16"),
    bf16=FLAG,
)


def encode(values: Tensor, frame: Frame) -> Tensor:
    """See `reference.encode_entropy`; of `values`, fp32 or bf16."""
    made = tables(torch.device("cpu"))
    code = torch.empty(frame.words, dtype=torch.int16, device="cpu")
    _encode(
        values=values.contiguous(),
        bf16=values.dtype == torch.bfloat16,
        **_numbers(frame),
        first=made.first,
        units=made.units,
        cost=made.cost,
        keys=scratch("entropy.keys", (frame.numel,), torch.int16),
        space=scratch("entropy.space", (_SPACE + MOST_CONTEXTS * _COUNTS,), torch.int32),
        scratch=scratch("entropy.words", (frame.length,), torch.int16),
        code=code,
    )
    return code


def decode(code: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """See `reference.decode_entropy`; `dtype` is fp32 or bf16. Values that are not valid are anything."""
    values = torch.empty(frame.numel, dtype=dtype, device="cpu")
    valid = _decode(
        code=code.contiguous(),
        **_numbers(frame),
        steps=tables(torch.device("cpu")).step,
        values=values,
        bf16=dtype == torch.bfloat16,
    )
    return values, bool(valid)


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
