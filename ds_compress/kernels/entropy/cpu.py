"""Entropy coding on the CPU by entropy.cpp."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.entropy import reference
from ds_compress.kernels.entropy.dithered import spare_words
from ds_compress.kernels.entropy.format import (
    CLASSES,
    FINER,
    KEYS,
    LARGEST_NUMEL,
    LEVELS,
    STEPS,
    TOTAL,
    CodeLayout,
    tables,
)
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, WORD, Buffer, Function
from ds_compress.kernels.quantize.grid import key_halves

__all__ = reference.__all__

_COPIES = 4  # of the histogram
_SPACE = 2 * KEYS * _COPIES + 4 * KEYS + 2
_SUMS = 2 * (KEYS + 1)
_AT_ONCE = 2  # blocks that are coded together

_FRAME: dict[str, Any] = {
    "numel": range(1, LARGEST_NUMEL + 1),
    "size": SIZE,
    "lanes": range(1, 33),
    "length": SIZE,
    "blocks": SIZE,
    "classes": range(1, CLASSES + 1),
    "rows": SIZE,
}
_VALUES: dict[str, Any] = {"values": Buffer(FLOATS, ("numel",), dtype_from="bf16"), "bf16": FLAG}
_KEY: dict[str, Any] = {"dithered": FLAG, "dither_first": WORD, "dither_second": WORD}
_CODE: dict[str, Any] = {
    "words": Buffer((torch.int16,), ("size",)),
    "shifts": Buffer((torch.int8,), ("rows",)),
}
_encode = Function(
    *("entropy", "encode_entropy"),
    **_VALUES,
    **_FRAME,
    is_sampled=FLAG,
    spare=SIZE,
    first=Buffer((torch.int32,), (FINER, LEVELS[-1] + 1)),
    units=Buffer((torch.int64,), (STEPS,)),
    weight=Buffer((torch.int64,), (KEYS,)),
    cost=Buffer((torch.int32,), (TOTAL + 1,)),
    quarter=Buffer((torch.int32,), (FINER, 4 * (LEVELS[-1] + 1) + 1)),
    inverse=Buffer((torch.float32,), (STEPS,)),
    **_KEY,
    tolerance=range(1 << 8),
    keys=Buffer((torch.int16,), ("numel",)),
    space=Buffer((torch.int32,), (_SPACE,)),
    scratch=Buffer((torch.int16,), (_AT_ONCE, "length")),
    sums=Buffer((torch.int64,), (_SUMS,)),
    levels=Buffer((torch.int64,), ("rows",)),
    **_CODE,
)
_decode = Function(
    *("entropy", "decode_entropy"),
    **_VALUES,
    **_FRAME,
    steps=Buffer((torch.float32,), (STEPS,)),
    **_KEY,
    q=Buffer((torch.int8,), (_AT_ONCE, "length")),
    **_CODE,
)


_OF_FRAME = ("numel", "lanes", "length", "blocks", "classes", "dithered")
_OF_FORMAT = ("first", "units", "weight", "cost", "quarter", "inverse")


class EntropyPlan:
    """Calls for messages of one frame, fp32 or bf16, in `rows` that are shifted, or 0."""

    def __init__(self, frame: CodeLayout, dtype: torch.dtype, rows: int):
        constants = tables(torch.device("cpu"), frame.unit_shift)
        known: dict[str, Any] = {name: getattr(frame, name) for name in _OF_FRAME}
        known |= {"bf16": dtype == torch.bfloat16, "size": frame.words, "rows": rows}
        table = {name: getattr(constants, name) for name in _OF_FORMAT}
        self.encode = _encode.bind(**known, **table, is_sampled=frame.is_sampled, spare=spare_words(frame))
        self.decode = _decode.bind(**known, steps=constants.step)


_plan = lru_cache(EntropyPlan)  # most messages have the shape of the one before


def encode_entropy(
    x: Tensor, frame: CodeLayout, dither: int | None = None, tolerance: int = 0
) -> tuple[Tensor, Tensor]:
    if not native.serves(x.numel()):
        return reference.encode_entropy(x, frame, dither, tolerance)
    rows = len(x) if x.dim() == 2 else 0
    values = (x if x.dtype in FLOATS else x.float()).contiguous()
    words = torch.empty(frame.words, dtype=torch.int16, device="cpu")
    shifts = torch.empty(rows, dtype=torch.int8, device="cpu")
    _plan(frame, values.dtype, rows).encode(
        values,
        *key_halves(dither or 0),
        tolerance,
        scratch("entropy.keys", (frame.numel,), torch.int16),
        scratch("entropy.space", (_SPACE,), torch.int32),
        scratch("entropy.words", (_AT_ONCE, frame.length), torch.int16),
        scratch("entropy.sums", (_SUMS,), torch.int64),
        scratch("entropy.levels", (rows,), torch.int64),
        words,
        shifts,
    )
    return words, shifts


_NO_SHIFTS = torch.empty(0, dtype=torch.int8, device="cpu")


def decode_entropy(
    words: Tensor,
    frame: CodeLayout,
    dtype: torch.dtype,
    dither: int | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if not native.serves(frame.numel):
        return reference.decode_entropy(words, frame, dtype, dither, shifts)
    shifts = _NO_SHIFTS if shifts is None else shifts.contiguous()
    values = torch.empty(frame.numel, dtype=dtype, device="cpu")
    q = scratch("entropy.q", (_AT_ONCE, frame.length), torch.int8)
    decode = _plan(frame, dtype, len(shifts)).decode
    is_valid = decode(values, *key_halves(dither or 0), q, words.contiguous(), shifts)
    if not is_valid:
        values.fill_(torch.nan)
    return values, torch.tensor(bool(is_valid), dtype=torch.bool, device="cpu")
