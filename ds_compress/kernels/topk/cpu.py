"""Selection on the CPU by kth_largest.cpp and selection.cpp; short tensors in numpy."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.memory import empty_template, scratch
from ds_compress.kernels.native.function import NUMBER, SIZE, Buffer, Function
from ds_compress.kernels.numerics import is_finite
from ds_compress.kernels.topk import reference
from ds_compress.kernels.topk.reference import INFINITY

__all__ = reference.__all__

_ABOVE_0 = range(1, 1 << 62)
_WORD = 64
_MOVED = (torch.float32, torch.bfloat16, torch.float16)
"""The floats whose bits C++ moves."""


def _floats(*dims: str | int) -> Buffer:
    return Buffer(_MOVED, dims, dtype_from="dtype")


_BITS = Buffer((torch.uint8,), ("n",), per=8)
_ENTRIES: dict[str, Any] = {
    "x": _floats("n"),
    "dtype": range(len(_MOVED)),
    "n": SIZE,
    "packed": _BITS,
    "count": SIZE,
    "values": _floats("count"),
}
_list_bits = Function(
    *("selection", "list_bits"), packed=_BITS, n=SIZE, indices=Buffer((torch.int64,), ("count",)), count=SIZE
)
_gather = Function("selection", "gather", **_ENTRIES)
_scatter = Function("selection", "scatter", **_ENTRIES)
_largest = Function(
    *("kth_largest", "select_largest"),
    x=_floats("rows", "d"),
    dtype=range(len(_MOVED)),
    **dict.fromkeys(("rows", "d", "words", "k"), SIZE),
    **dict.fromkeys(("stride", "first", "last"), _ABOVE_0),
    infinity=NUMBER,
    space=_floats("words", _WORD),
    packed=Buffer((torch.uint8,), ("rows", "d"), per=8),
    values=_floats("rows", "k"),
)


def sample_plan(d: int, k: int, least: int) -> tuple[int, int, int]:
    """Plan a sample of a row of `d` entries that brackets its k-th largest.

    The number of sampled entries among the k largest is about Poisson, and the ranks lie three of its
    standard deviations to each side. The stride shares no factor with d, hence none with the last dimension:
    otherwise the sample would see some channels only, and outlier channels are common.

    Args:
        least: entries of the sample at least.

    Returns:
        (stride, high, low): every stride-th entry is sampled. The k-th largest of the row almost surely lies
        between the samples of these two ranks, 1 being the largest.
    """
    stride = max(1, d // least)
    while math.gcd(stride, d) > 1:
        stride += 1
    length = -(-d // stride)
    expected = k * length / d
    margin = 3 * math.sqrt(expected) + 1
    return stride, max(1, int(expected - margin)), min(length, math.ceil(expected + margin))


@lru_cache(maxsize=1024)  # most messages have the shape of the one before
def first_look(d: int, k: int) -> tuple[int, int, int]:
    """Return `sample_plan` for a sample about four of whose entries are among the k largest. It only says
    where to search first, and ranking it costs no more time than it saves."""
    return sample_plan(d, k, min(1 << 14, max(min(d // 16, 1 << 10), d // 64, 4 * d // k)))


class LargestPlan:
    """A call that selects the k largest of each row of [rows, d] floats of one dtype; 0 < k <= d."""

    def __init__(self, dtype: torch.dtype, rows: int, d: int, k: int):
        stride, first, last = first_look(d, k)
        words = -(-d // _WORD)
        known = {"rows": rows, "d": d, "words": words, "k": k, "stride": stride, "first": first, "last": last}
        self.call = _largest.bind(dtype=_MOVED.index(dtype), **known, infinity=INFINITY[dtype])
        self.space = (words * _WORD,)
        self.packed = empty_template((-(-rows * d // 8),), torch.uint8)
        self.values = empty_template((rows * k,), dtype)


class ScatterPlan:
    """A call that scatters `count` values of one dtype to a tensor of `shape`, and a template of that."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, count: int):
        self.template = empty_template(shape, dtype)
        if dtype in _MOVED:
            self.call = _scatter.bind(dtype=_MOVED.index(dtype), n=self.template.numel(), count=count)


_largest_plan, _scatter_plan = lru_cache(LargestPlan), lru_cache(ScatterPlan)


def pack_bits(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.list_bits`; 0 where fewer than `count` bits are set."""
    if not native.serves(numel):
        mask = np.unpackbits(packed.numpy(), count=numel, bitorder="little")
        return torch.from_numpy(np.flatnonzero(mask)[:count])
    found = torch.empty_like(empty_template((count,), torch.int64))
    _list_bits.bind(n=numel, count=count)(packed.contiguous(), found)
    return found


def gather(x: Tensor, entries: Tensor, count: int) -> Tensor:
    """See `reference.gather`; of damaged bits, of which fewer than `count` are set, the first entry."""
    if entries.dtype != torch.uint8 or not _is_supported(x):
        return reference.gather(x, entries, count)
    out = torch.empty_like(empty_template((count,), x.dtype))
    _gather.bind(dtype=_MOVED.index(x.dtype), n=x.numel(), count=count)(x.contiguous(), entries, out)
    return torch.where(is_finite(x), out, torch.nan)


def scatter(values: Tensor, entries: Tensor, shape: tuple[int, ...]) -> Tensor:
    """See `reference.scatter`; of damaged bits, of which another number is set, all values that fit."""
    plan = _scatter_plan(shape, values.dtype, values.numel())
    if entries.dtype != torch.uint8 or not _is_supported(plan.template):
        return reference.scatter(values, entries, shape)
    y = torch.empty_like(plan.template)
    plan.call(y, entries, values.contiguous())
    return y


def select_largest(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.select_largest`; the entries as bits."""
    if not _is_supported(x):
        return reference.select_largest(x, k, values)
    plan = _largest_plan(x.dtype, *x.shape, k)
    packed = torch.empty_like(plan.packed)
    values = torch.empty_like(plan.values) if values is None else values
    plan.call(x.contiguous(), scratch("keys", plan.space, x.dtype), packed, values)
    return packed, values


def _is_supported(x: Tensor) -> bool:
    return x.dtype in _MOVED and native.serves(x.numel())
