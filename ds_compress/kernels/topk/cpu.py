"""Selection on the CPU by kth_largest.cpp and selection.cpp; short tensors in numpy."""

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.feedback.cpu import is_finite
from ds_compress.kernels.memory import empty_template, scratch
from ds_compress.kernels.native.function import (
    NUMBER,
    SIZE,
    SIZES,
    Buffer,
    Function,
    for_each_dtype,
)
from ds_compress.kernels.topk import reference
from ds_compress.kernels.topk.reference import INFINITY, first_look

__all__ = reference.__all__

_ABOVE_0 = range(1, 1 << 62)
_WORD = 64
_BITS = Buffer((torch.uint8,), ("n",), per=8)


def _int64(*dims: str) -> Buffer:
    return Buffer((torch.int64,), dims)


_set_bits = Function("selection", "set_bits", indices=_int64("count"), count=SIZE, packed=_BITS, n=SIZE)
_list_bits = Function("selection", "list_bits", packed=_BITS, n=SIZE, most=SIZE, found=_int64("most"))
_largest = for_each_dtype(
    *("kth_largest", "select_largest", SIZES),
    x=("rows", "d"),
    **dict.fromkeys(("rows", "d", "words", "k"), SIZE),
    **dict.fromkeys(("stride", "first", "last"), _ABOVE_0),
    infinity=NUMBER,
    space=("words", _WORD),
    packed=Buffer((torch.uint8,), ("rows", "d"), per=8),
    values=("rows", "k"),
)
_gather = for_each_dtype(
    *("selection", "gather", SIZES), x=("n",), n=_ABOVE_0, packed=_BITS, count=SIZE, out=("count",)
)
_scatter = for_each_dtype(
    *("selection", "scatter", SIZES), values=("count",), count=SIZE, packed=_BITS, n=SIZE, y=("n",)
)


def pack_bits(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """See `reference.set_bits`.

    Raises:
        IndexError: an index is not below `numel`.
    """
    if not native.serves(numel):
        return pack_bits(reference.as_mask(indices, numel))
    packed = torch.zeros(-(-numel // 8), dtype=torch.uint8, device="cpu")
    done = _set_bits(indices=indices.contiguous(), count=indices.numel(), packed=packed, n=numel)
    if done < indices.numel():
        raise IndexError(f"index {indices[done]} came, of {numel} entries")
    return packed


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.list_bits`; 0 where fewer than `count` bits are set."""
    if not native.serves(numel):
        mask = np.unpackbits(packed.numpy(), count=numel, bitorder="little")
        return torch.from_numpy(np.flatnonzero(mask)[:count])
    found = torch.empty_like(empty_template((count,), torch.int64))
    _list_bits.bind(n=numel, most=count)(packed.contiguous(), found)
    return found


def copy_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    if native.serves(numel):
        return packed.clone()
    return list_bits(packed, numel, count)


def gather(x: Tensor, entries: Tensor, count: int) -> Tensor:
    """See `reference.gather`; of damaged bits, of which fewer than `count` are set, the first entry."""
    if entries.dtype != torch.uint8 or not native.serves(x.numel()):
        return reference.gather(x, entries, count)
    out = torch.empty_like(empty_template((count,), x.dtype))
    _gather[x.dtype].bind(n=x.numel(), count=count)(x.contiguous(), entries, out)
    return torch.where(is_finite(x), out, torch.nan)


def scatter(values: Tensor, entries: Tensor, shape: tuple[int, ...]) -> Tensor:
    """See `reference.scatter`; of damaged bits, of which another number is set, all values that fit."""
    template = empty_template(shape, values.dtype)
    if entries.dtype != torch.uint8 or not native.serves(template.numel()):
        return reference.scatter(values, entries, shape)
    y = torch.empty_like(template)
    _scatter[y.dtype].bind(n=y.numel(), count=values.numel())(values.contiguous(), entries, y)
    return y


def select_largest(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `reference.select_largest`; as bits, with values."""
    if not native.serves(x.numel()):
        return reference.select_largest(x, k)
    rows, d = x.shape
    (stride, first, last), words = first_look(d, k), -(-d // _WORD)
    known = {"rows": rows, "d": d, "words": words, "k": k, "stride": stride, "first": first, "last": last}
    packed = torch.empty_like(empty_template((-(-rows * d // 8),), torch.uint8))
    values = torch.empty_like(empty_template((rows * k,), x.dtype)) if values is None else values
    call = _largest[x.dtype].bind(**known, infinity=INFINITY[x.dtype])
    call(x.contiguous(), scratch("keys", (words * _WORD,), x.dtype), packed, values)
    return packed, values
