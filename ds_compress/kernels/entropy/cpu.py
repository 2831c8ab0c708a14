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
    MOST_CONTEXTS,
    PER_WORD,
    STEPS,
    TOTAL,
    CodeLayout,
    SortedBlocks,
    tables,
)
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, WORD, Buffer, Function
from ds_compress.kernels.quantize.grid import key_halves

__all__ = reference.__all__

_COPIES = 4  # of the histogram
_COUNTS = 4 * KEYS + 2  # of each context
_SPACE = 2 * KEYS * _COPIES + MOST_CONTEXTS * _COUNTS
_SUMS = MOST_CONTEXTS * 2 * (KEYS + 1)
_AT_ONCE = 2  # blocks that are coded together

_FRAME: dict[str, Any] = {
    "numel": range(1, 1 << 32),
    "size": SIZE,
    "lanes": range(1, 33),
    "length": SIZE,
    "blocks": SIZE,
    "contexts": range(1, MOST_CONTEXTS + 1),
    "per_context": range(1, CLASSES + 1),
    "ends": Buffer((torch.int64,), ("contexts",)),
}
_CODE = Buffer((torch.int16,), ("size",))
_VALUES: dict[str, Any] = {"values": Buffer((*FLOATS,), ("numel",), dtype_from="bf16"), "bf16": FLAG}
_ENCODE: dict[str, Any] = {
    **_VALUES,
    **_FRAME,
    "first": Buffer((torch.int32,), (FINER, LEVELS[-1] + 1)),
    "units": Buffer((torch.int64,), (STEPS,)),
    "cost": Buffer((torch.int32,), (TOTAL + 1,)),
    "keys": Buffer((torch.int16,), ("numel",)),
    "space": Buffer((torch.int32,), (_SPACE,)),
    "scratch": Buffer((torch.int16,), (_AT_ONCE, "length")),
    "code": _CODE,
}
_DECODE: dict[str, Any] = {
    "code": _CODE,
    **_FRAME,
    "steps": Buffer((torch.float32,), (STEPS,)),
    "q": Buffer((torch.int8,), ("numel",)),
    **_VALUES,
}
_SORTED: dict[str, Any] = {
    "count": range(CLASSES, 1 << 31),
    "rest": SIZE,
    "columns": FLAG,
    "order": Buffer((torch.int32,), (2, "count")),
}
_KEY: dict[str, Any] = {"dither_first": WORD, "dither_second": WORD}
_DITHER: dict[str, Any] = {
    **_KEY,
    "is_sampled": FLAG,
    "spare": SIZE,
    "quarter": Buffer((torch.int32,), (FINER, 4 * (LEVELS[-1] + 1) + 1)),
    "inverse": Buffer((torch.float32,), (STEPS,)),
    "sums": Buffer((torch.int64,), (_SUMS,)),
}
_CLASSES = {"classes": Buffer((torch.int16,), ("count",), per=PER_WORD)}
_KEPT = {"kept": Buffer((torch.int16,), ("numel",))}
_encode_entropy = Function("entropy", "encode_entropy", **_ENCODE)
_decode_entropy = Function("entropy", "decode_entropy", **_DECODE)
_encode_sorted = Function("entropy", "encode_sorted", **_ENCODE, **_SORTED, **_CLASSES)
_decode_sorted = Function("entropy", "decode_sorted", **_DECODE, **_SORTED, **_CLASSES)
_encode_dithered = Function("entropy", "encode_dithered_entropy", **_ENCODE, **_DITHER)
_decode_dithered = Function("entropy", "decode_dithered_entropy", **_DECODE, **_KEY)
_encode_dithered_sorted = Function(
    "entropy", "encode_dithered_sorted", **_ENCODE, **_DITHER, **_SORTED, **_CLASSES
)
_decode_dithered_sorted = Function(
    "entropy", "decode_dithered_sorted", **_DECODE, **_KEY, **_SORTED, **_KEPT, **_CLASSES
)


def encode_entropy(x: Tensor, frame: CodeLayout, dither: int | None = None) -> Tensor:
    if not native.serves(x.numel()):
        return reference.encode_entropy(x, frame, dither)
    code = torch.empty(frame.words, dtype=torch.int16, device="cpu")
    arguments = {**_encode_arguments(x, frame), "code": code}
    if dither is None:
        _encode_entropy(**arguments)
    else:
        _encode_dithered(**arguments, **_dither_arguments(frame, dither))
    return code


def decode_entropy(
    words: Tensor, frame: CodeLayout, dtype: torch.dtype, dither: int | None = None
) -> tuple[Tensor, Tensor]:
    if not native.serves(frame.numel):
        return reference.decode_entropy(words, frame, dtype, dither)
    arguments = _decode_arguments(words, frame, dtype)
    if dither is None:
        is_valid = _decode_entropy(**arguments)
    else:
        is_valid = _decode_dithered(**arguments, **_key_arguments(dither))
    return _checked(arguments["values"], is_valid, dtype)


def encode_sorted(x: Tensor, frame: CodeLayout, units: SortedBlocks, dither: int | None = None) -> Tensor:
    if not native.serves(x.numel()):
        return reference.encode_sorted_with(encode_entropy, x, frame, units, dither)
    words = torch.empty(frame.words + units.words, dtype=torch.int16, device="cpu")
    arguments = {**_encode_arguments(x, frame), **_sorted_arguments(frame, units)}
    arguments |= {"code": words[: frame.words], "classes": words[frame.words :]}
    if dither is None:
        _encode_sorted(**arguments)
    else:
        _encode_dithered_sorted(**arguments, **_dither_arguments(frame, dither))
    return words


def decode_sorted(
    words: Tensor, frame: CodeLayout, units: SortedBlocks, dtype: torch.dtype, dither: int | None = None
) -> tuple[Tensor, Tensor]:
    if not native.serves(frame.numel):
        return reference.decode_sorted_with(decode_entropy, words, frame, units, dtype, dither)
    words = words.contiguous()
    arguments = _decode_arguments(words[: frame.words], frame, dtype)
    arguments |= {**_sorted_arguments(frame, units), "classes": words[frame.words :]}
    if dither is None:
        is_valid = _decode_sorted(**arguments)
    else:
        kept = scratch("entropy.keys", (frame.numel,), torch.int16)
        is_valid = _decode_dithered_sorted(**arguments, **_key_arguments(dither), kept=kept)
    return _checked(arguments["values"], is_valid, dtype)


def _checked(values: Tensor, is_valid: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not is_valid:
        values = values.fill_(torch.nan)
    if dtype == torch.float16:
        values = values.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return values.to(dtype), torch.tensor(bool(is_valid), dtype=torch.bool, device="cpu")


def _encode_arguments(x: Tensor, frame: CodeLayout) -> dict[str, Any]:
    """Return the arguments of _ENCODE except `code`."""
    values, made = x if x.dtype in FLOATS else x.float(), tables(torch.device("cpu"))
    return {
        "values": values.contiguous(),
        "bf16": values.dtype == torch.bfloat16,
        **_frame_arguments(frame),
        "first": made.first,
        "units": made.units,
        "cost": made.cost,
        "keys": scratch("entropy.keys", (frame.numel,), torch.int16),
        "space": scratch("entropy.space", (_SPACE,), torch.int32),
        "scratch": scratch("entropy.words", (_AT_ONCE, frame.length), torch.int16),
    }


def _decode_arguments(code: Tensor, frame: CodeLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of _DECODE, with new memory for `values`."""
    made = dtype if dtype in FLOATS else torch.float32
    return {
        "code": code.contiguous(),
        **_frame_arguments(frame),
        "steps": tables(torch.device("cpu")).step,
        "q": scratch("entropy.q", (frame.numel,), torch.int8),
        "values": torch.empty(frame.numel, dtype=made, device="cpu"),
        "bf16": made == torch.bfloat16,
    }


def _dither_arguments(frame: CodeLayout, dither: int) -> dict[str, Any]:
    """Return the arguments of _DITHER."""
    made = tables(torch.device("cpu"))
    return {
        **_key_arguments(dither),
        "is_sampled": frame.is_sampled,
        "spare": spare_words(frame),
        "quarter": made.quarter,
        "inverse": made.inverse,
        "sums": scratch("entropy.sums", (_SUMS,), torch.int64),
    }


def _key_arguments(dither: int) -> dict[str, Any]:
    """Return the arguments of _KEY."""
    return dict(zip(_KEY, key_halves(dither)))


@lru_cache(maxsize=1024)
def _frame_arguments(frame: CodeLayout) -> dict[str, Any]:
    return {
        "numel": frame.numel,
        "size": frame.words,
        "lanes": frame.lanes,
        "length": frame.length,
        "blocks": frame.blocks,
        "contexts": frame.contexts,
        "per_context": frame.classes,
        "ends": torch.tensor(frame.ends, dtype=torch.int64, device="cpu"),
    }


def _sorted_arguments(frame: CodeLayout, units: SortedBlocks) -> dict[str, Any]:
    """Return the arguments of _SORTED except `classes`."""
    return {
        "count": units.count,
        "rest": frame.numel - units.count * units.size,
        "columns": units.columns,
        "order": scratch("entropy.order", (2, units.count), torch.int32),
    }
