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
    "numel": range(1, 1 << 32),
    "size": SIZE,
    "lanes": range(1, 33),
    "length": SIZE,
    "blocks": SIZE,
    "classes": range(1, CLASSES + 1),
}
_VALUES: dict[str, Any] = {"values": Buffer((*FLOATS,), ("numel",), dtype_from="bf16"), "bf16": FLAG}
_KEY: dict[str, Any] = {"dithered": FLAG, "dither_first": WORD, "dither_second": WORD}
_WORDS = Buffer((torch.int16,), ("size",))
_encode = Function(
    *("entropy", "encode_entropy"),
    **_VALUES,
    **_FRAME,
    is_sampled=FLAG,
    spare=SIZE,
    first=Buffer((torch.int32,), (FINER, LEVELS[-1] + 1)),
    units=Buffer((torch.int64,), (STEPS,)),
    cost=Buffer((torch.int32,), (TOTAL + 1,)),
    quarter=Buffer((torch.int32,), (FINER, 4 * (LEVELS[-1] + 1) + 1)),
    inverse=Buffer((torch.float32,), (STEPS,)),
    **_KEY,
    keys=Buffer((torch.int16,), ("numel",)),
    space=Buffer((torch.int32,), (_SPACE,)),
    scratch=Buffer((torch.int16,), (_AT_ONCE, "length")),
    sums=Buffer((torch.int64,), (_SUMS,)),
    words=_WORDS,
)
_decode = Function(
    *("entropy", "decode_entropy"),
    **_VALUES,
    **_FRAME,
    steps=Buffer((torch.float32,), (STEPS,)),
    **_KEY,
    q=Buffer((torch.int8,), ("numel",)),
    words=_WORDS,
)

_ROWS: dict[str, Any] = {
    "values": Buffer((*FLOATS,), ("rows", "width"), dtype_from="bf16"),
    "bf16": FLAG,
    "rows": SIZE,
    "width": SIZE,
}
_SHIFTS = Buffer((torch.int8,), ("rows",))
_shift = Function(
    *("rows", "shift_rows"),
    **_ROWS,
    tolerance=range(1 << 8),
    shifts=_SHIFTS,
    levels=Buffer((torch.int32,), (2, "rows")),
    shifted=Buffer((*FLOATS,), ("rows", "width"), dtype_from="bf16"),
)
_unshift = Function(*("rows", "unshift_rows"), **_ROWS, shifts=_SHIFTS)


class EntropyPlan:
    """Calls for messages of one frame, fp32 or bf16."""

    def __init__(self, frame: CodeLayout, dtype: torch.dtype):
        made = tables(torch.device("cpu"))
        known: dict[str, Any] = {
            "bf16": dtype == torch.bfloat16,
            "numel": frame.numel,
            "size": frame.words,
            "lanes": frame.lanes,
            "length": frame.length,
            "blocks": frame.blocks,
            "classes": frame.classes,
            "dithered": frame.dithered,
        }
        self.encode = _encode.bind(
            **known,
            is_sampled=frame.is_sampled,
            spare=spare_words(frame),
            **{name: getattr(made, name) for name in ("first", "units", "cost", "quarter", "inverse")},
        )
        self.decode = _decode.bind(**known, steps=made.step)


_plan = lru_cache(EntropyPlan)  # most messages have the shape of the one before


def encode_entropy(x: Tensor, frame: CodeLayout, dither: int | None = None) -> Tensor:
    if not native.serves(x.numel()):
        return reference.encode_entropy(x, frame, dither)
    values = (x if x.dtype in FLOATS else x.float()).contiguous()
    words = torch.empty(frame.words, dtype=torch.int16, device="cpu")
    _plan(frame, values.dtype).encode(
        values,
        *key_halves(dither or 0),
        scratch("entropy.keys", (frame.numel,), torch.int16),
        scratch("entropy.space", (_SPACE,), torch.int32),
        scratch("entropy.words", (_AT_ONCE, frame.length), torch.int16),
        scratch("entropy.sums", (_SUMS,), torch.int64),
        words,
    )
    return words


def decode_entropy(
    words: Tensor, frame: CodeLayout, dtype: torch.dtype, dither: int | None = None
) -> tuple[Tensor, Tensor]:
    if not native.serves(frame.numel):
        return reference.decode_entropy(words, frame, dtype, dither)
    words, values = words.contiguous(), torch.empty(frame.numel, dtype=dtype, device="cpu")
    is_valid = _plan(frame, dtype).decode(
        values,
        *key_halves(dither or 0),
        scratch("entropy.q", (frame.numel,), torch.int8),
        words,
    )
    if not is_valid:
        values.fill_(torch.nan)
    return values, torch.tensor(bool(is_valid), dtype=torch.bool, device="cpu")


def shift_rows(x: Tensor, tolerance: int) -> tuple[Tensor, Tensor]:
    if not native.serves(x.numel()):
        return reference.shift_rows(x, tolerance)
    values, (rows, width) = (x if x.dtype in FLOATS else x.float()).contiguous(), x.shape
    shifts = torch.empty(rows, dtype=torch.int8, device="cpu")
    levels = scratch("entropy.levels", (2, rows), torch.int32)
    shifted = scratch("entropy.rows", (rows, width), values.dtype)
    call = _shift.bind(bf16=values.dtype == torch.bfloat16, rows=rows, width=width, tolerance=tolerance)
    return (shifted if call(values, shifts, levels, shifted) else values), shifts


def unshift_rows(y: Tensor, shifts: Tensor) -> Tensor:
    if not native.serves(y.numel()):
        return reference.unshift_rows(y, shifts)
    rows, width = y.shape
    _unshift.bind(bf16=y.dtype == torch.bfloat16, rows=rows, width=width)(y, shifts.contiguous())
    return y
