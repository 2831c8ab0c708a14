"""Entries that both sides know, on a GPU: read out of a tensor, and put back.

Where a set is held as bits, the tensor and the bits are walked side by side: all memory is read and
written in order, and indices, 8 bytes each, are never made. Where it is held as indices, putting back is
`index_copy_` into zeros: a kernel of ours would write the same zeros and the same scattered entries.

Floats are moved as integers of their size.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels import reference
from ds_compress.kernels.topk import triton_bitstring as bitstring
from ds_compress.kernels.topk.keys import INFINITY, as_integers
from ds_compress.kernels.topk.triton_bitstring import block_ends, listed

TILES = 4  # blocks that one program looks through


def received(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.received`: the bits, as they are."""
    return packed.clone()


def gather(x: Tensor, held: Tensor, count: int) -> Tensor:
    """See `reference.gather`."""
    bits, numel = as_integers(x.detach()), x.numel()
    values = bits.new_empty(count)
    if not count:
        return values.view(x.dtype)
    overflow = torch.zeros(1, dtype=torch.int32, device=x.device)
    infinity = INFINITY[x.dtype]
    nan = torch.tensor(math.nan, dtype=x.dtype, device="cpu").view(bits.dtype).item()
    block = bitstring.BLOCK
    with torch.cuda.device_of(x):
        if held.dtype == torch.uint8:
            ends = block_ends(held, numel)
            _compress[(len(ends),)](
                bits, held, ends, values, overflow, numel, count, INFINITY=infinity, BLOCK=block
            )
            _spoil[(triton.cdiv(count, block),)](
                values, ends, overflow, len(ends), count, NAN=nan, BLOCK=block
            )
        else:
            _look[(triton.cdiv(numel, block * TILES),)](
                bits, overflow, numel, INFINITY=infinity, BLOCK=block, TILES=TILES
            )
            _gather[(triton.cdiv(count, block),)](bits, held, overflow, values, count, NAN=nan, BLOCK=block)
    return values.view(x.dtype)


def scatter(values: Tensor, held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """See `reference.scatter`."""
    if held.dtype != torch.uint8:
        return reference.scatter(values, held, shape)
    bits = as_integers(values)
    out = bits.new_empty(shape)
    numel = out.numel()
    if numel:
        with torch.cuda.device_of(values):
            ends = block_ends(held, numel)
            _expand[(len(ends),)](bits, held, ends, out, numel, bits.numel(), BLOCK=bitstring.BLOCK)
    return out.view(values.dtype)


@triton.jit(do_not_specialize=["numel", "count"])
def _compress(
    bits, packed, ends, values, overflow, numel, count, INFINITY: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the entries of a block whose bits are set, and set `overflow` if any of the block is not
    finite."""
    entry, kept, slot = listed(packed, ends, numel, count, BLOCK)
    value = tl.load(bits + entry, mask=entry < numel, other=0)
    tl.store(values + slot, value, mask=kept)
    if tl.max(_not_finite(value, INFINITY), 0) > 0:
        tl.store(overflow, 1)


@triton.jit(do_not_specialize=["blocks", "count"])
def _spoil(values, ends, overflow, blocks, count, NAN: tl.constexpr, BLOCK: tl.constexpr):
    """Write nan to all values if there was an overflow; if not, only zero to those that a damaged bitmask
    lacks."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    spoilt = tl.load(overflow) > 0
    first = tl.where(spoilt, 0, tl.load(ends + blocks - 1))
    fill = tl.where(spoilt, tl.full([BLOCK], NAN, values.dtype.element_ty), 0)
    tl.store(values + place, fill, mask=(place >= first) & (place < count))


@triton.jit(do_not_specialize=["numel", "count"])
def _expand(values, packed, ends, out, numel, count, BLOCK: tl.constexpr):
    entry, kept, slot = listed(packed, ends, numel, count, BLOCK)
    tl.store(out + entry, tl.load(values + slot, mask=kept, other=0), mask=entry < numel)


@triton.jit(do_not_specialize=["numel"])
def _look(bits, overflow, numel, INFINITY: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Set `overflow` if an entry is not finite."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    found = tl.zeros([BLOCK], tl.int32)
    for i in range(TILES):
        place = start + i * BLOCK + tl.arange(0, BLOCK)
        found |= _not_finite(tl.load(bits + place, mask=place < numel, other=0), INFINITY)
    if tl.max(found, 0) > 0:
        tl.store(overflow, 1)


@triton.jit(do_not_specialize=["count"])
def _gather(bits, selection, overflow, values, count, NAN: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(selection + place, mask=place < count, other=0)
    value = tl.load(bits + index, mask=place < count, other=0)
    value = tl.where(tl.load(overflow) > 0, tl.full([BLOCK], NAN, values.dtype.element_ty), value)
    tl.store(values + place, value, mask=place < count)


@triton.jit
def _not_finite(bits, INFINITY: tl.constexpr):
    """0 or 1: whether the float of these bits is inf or nan."""
    if bits.dtype.primitive_bitwidth == 16:
        bits = bits.to(tl.int32) & 0x7FFF
    elif bits.dtype.primitive_bitwidth == 32:
        bits = bits & 0x7FFFFFFF
    else:
        bits = bits & 0x7FFFFFFFFFFFFFFF
    return (bits >= INFINITY).to(tl.int32)
