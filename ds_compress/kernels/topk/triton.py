"""Selection, bit strings, gather and scatter on a GPU, equal to the reference.

Selection of 16- and 32-bit floats reads the tensor twice. The first read counts, per block of a row, the
entries whose key reaches each bound; `select_largest` finds its bounds in the same read (see `kth_largest`),
except for short rows, which are read once more for each byte of a key. After a running sum of the counts over
the blocks, the second read writes every kept entry to its place and sets its bit. The host never waits.

To list or move the entries of set bits, one read counts the bits per block, and a running sum adds the counts
up (`block_ends`). If entries are stored as bits, the tensor and the bits are read and written in order, and
indices of 8 bytes each are never made. If they are stored as indices, `index_copy_` into zeros does the same
writes as a kernel would. Floats are moved as integers of their size.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.topk import reference
from ds_compress.kernels.topk import triton_order_statistics as order
from ds_compress.kernels.topk.reference import INFINITY, as_integers, sample_plan
from ds_compress.kernels.topk.triton_order_statistics import key_of

__all__ = reference.__all__

BLOCK = 4096
"""Entries of one program, a multiple of 8; below 2^15, as two counts share an int32."""

WARPS = 8  # of a program; with half as many _write does not fit in the registers

LONGEST_ROW = 1 << 30
"""Longer rows, and floats of 8 bytes, are left to the reference: keys and places in a row are int32 here."""

NO_KEY = tl.constexpr(2**31 - 1)  # larger than the key of infinity

COUNTED = 16  # blocks whose bits one program counts
SCANNED = 4  # blocks in which one program looks for inf and nan


def select_largest(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if x.itemsize > 4 or x.shape[1] > LONGEST_ROW:
        return reference.select_largest(x, k, values)
    d = x.shape[1]
    bits, infinity, block = as_integers(x), INFINITY[x.dtype], _block(d)
    stride, high, low = sample_plan(d, k)
    with torch.cuda.device_of(x):
        if stride == 1:  # a short row is its own sample
            bounds = order.order_statistics(bits, infinity, 1, (k,))
            counts = _reaching(bits, bounds, infinity, block)
        else:
            bounds = order.order_statistics(bits, infinity, stride, (low, high))
            # the sample says nothing of keys beyond its largest and its smallest
            if low == triton.cdiv(d, stride):
                bounds[0].zero_()
            if high == 1:
                bounds[1].fill_(infinity + 1)
            bounds, counts = order.kth_largest(bits, bounds, infinity, k, block)
        return _chosen(x, bits, bounds, counts, k, block, values)


def _block(d: int) -> int:
    return max(8, min(BLOCK, triton.next_power_of_2(d)))


def _reaching(bits: Tensor, bounds: Tensor, infinity: int, block: int) -> Tensor:
    """Count the entries of each block whose keys are at least each of `bounds`.

    Args:
        bounds: int32 [bounds, rows].

    Returns:
        int32 [bounds, rows, blocks].
    """
    rows, d = bits.shape
    blocks = triton.cdiv(d, block)
    counts = torch.empty(len(bounds), rows, blocks, dtype=torch.int32, device=bits.device)
    _count[(rows * blocks,)](
        bits,
        bounds,
        counts,
        rows,
        d,
        blocks,
        BOUNDS=len(bounds),
        INFINITY=infinity,
        BLOCK=block,
        num_warps=WARPS,
    )
    return counts


def _chosen(
    x: Tensor,
    bits: Tensor,
    bounds: Tensor,
    counts: Tensor,
    k: int,
    block: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Select the k largest entries of each row, given ascending `bounds`; see `reference.select_largest`.

    Values are written to `out` if it is given. Entries are returned as a bitmask, or as indices if rows share
    a byte, which two programs would have to write.
    """
    rows, d = x.shape
    if rows == 1 or d % 8 == 0:
        entries = torch.empty(triton.cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    else:
        entries = torch.empty(rows * k, dtype=torch.int64, device=x.device)
    values = torch.empty(rows * k, dtype=x.dtype, device=x.device) if out is None else out
    _write[(rows * counts.shape[2],)](
        bits,
        bounds,
        counts.cumsum(2, dtype=torch.int32),
        entries,
        as_integers(values),
        rows,
        d,
        counts.shape[2],
        k,
        BOUNDS=len(bounds),
        INFINITY=INFINITY[x.dtype],
        BLOCK=block,
        num_warps=WARPS,
    )
    return entries, values


@triton.jit(do_not_specialize=["rows", "d", "blocks"])
def _count(
    bits, bounds, counts, rows, d, blocks, BOUNDS: tl.constexpr, INFINITY: tl.constexpr, BLOCK: tl.constexpr
):
    """counts[i, row, block] = how many entries of the block reach bounds[i, row]."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    key = key_of(tl.load(bits + row * d + column, mask=column < d, other=0), INFINITY)
    for i in tl.static_range(BOUNDS):
        reached = (key >= tl.load(bounds + i * rows + row)) & (column < d)
        tl.store(counts + (i * rows + row) * blocks + block, tl.sum(reached.to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows", "d", "blocks", "k"])
def _write(
    bits,
    bounds,
    reaching,
    entries,
    values,
    rows,
    d,
    blocks,
    k,
    BOUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the kept entries of a block to `values`, and to `entries` their indices or, if it is uint8, their
    bits; `reaching` is the running sum of the counts over the blocks of a row.

    `level` bounds are reached by at least k entries. What reaches more of them is above and kept; what
    reaches exactly that many is tied and fills the places that are left.
    """
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    level = tl.zeros([], tl.int32)
    for i in tl.static_range(BOUNDS):
        level += (tl.load(reaching + (i * rows + row + 1) * blocks - 1) >= k).to(tl.int32)
    lower, upper = (level - 1) * rows + row, level * rows + row  # places of the bounds round the tied entries
    tied_before = tl.load(reaching + lower * blocks + block - 1, mask=(level > 0) & (block > 0), other=0)
    tied_before = tl.where(level > 0, tied_before, block * BLOCK)
    above_before = tl.load(
        reaching + upper * blocks + block - 1, mask=(level < BOUNDS) & (block > 0), other=0
    )
    above_total = tl.load(reaching + (upper + 1) * blocks - 1, mask=level < BOUNDS, other=0)
    tied_before -= above_before
    ties = k - above_total

    column = block * BLOCK + tl.arange(0, BLOCK)
    exists = column < d
    value = tl.load(bits + row * d + column, mask=exists, other=0)
    key = key_of(value, INFINITY)
    above = exists & (key >= tl.load(bounds + upper, mask=level < BOUNDS, other=NO_KEY))
    tied = exists & ~above & (key >= tl.load(bounds + lower, mask=level > 0, other=0))
    both = tl.cumsum((above.to(tl.int32) << 16) + tied.to(tl.int32), 0)
    rank = tied_before + (both & 0xFFFF)
    filled = tl.minimum(rank, ties)
    kept = above | (tied & (rank <= ties))
    slot = row * k + above_before + (both >> 16) + filled - 1
    tl.store(values + slot, value, mask=kept)
    if entries.dtype.element_ty == tl.uint8:
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        eight = tl.reshape(kept.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
        tl.store(entries + row * (d // 8) + byte, tl.sum(eight, 1).to(tl.uint8), mask=byte * 8 < d)
    else:
        tl.store(entries + slot, row * d + column, mask=kept)


def pack_bits(bits: Tensor) -> Tensor:
    bits = bits.contiguous().view(torch.uint8)
    packed = bits.new_empty(triton.cdiv(bits.numel(), 8))
    if bits.numel():
        with torch.cuda.device_of(bits):
            _pack[(triton.cdiv(bits.numel(), BLOCK),)](bits, packed, bits.numel(), BLOCK=BLOCK)
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    bits = packed.new_empty(numel)
    if numel:
        with torch.cuda.device_of(packed):
            _unpack[(triton.cdiv(numel, BLOCK),)](packed.contiguous(), bits, numel, BLOCK=BLOCK)
    return bits.view(torch.bool)


def set_bits(indices: Tensor, numel: int) -> Tensor:
    return pack_bits(reference.as_mask(indices, numel))


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.list_bits`; 0 where fewer than `count` bits are set."""
    found = torch.zeros(count, dtype=torch.int64, device=packed.device)
    if count:
        packed = packed.contiguous()
        with torch.cuda.device_of(packed):
            ends = block_ends(packed, numel)
            _list[(len(ends),)](packed, ends, found, numel, count, BLOCK=BLOCK)
    return found


def block_ends(packed: Tensor, numel: int) -> Tensor:
    """int64 [ceil(numel / BLOCK)]: how many of the first `numel` bits of `packed` are set up to the end of a
    block."""
    blocks = triton.cdiv(numel, BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=packed.device)
    _popcount[(triton.cdiv(blocks, COUNTED),)](packed, counts, numel, blocks, BLOCK=BLOCK, TILES=COUNTED)
    return counts.cumsum(0)


@triton.jit(do_not_specialize=["numel"])
def _pack(bits, packed, numel, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    place = tl.arange(0, 8)[None, :]
    entry = byte[:, None] * 8 + place
    bit = tl.load(bits + entry, mask=entry < numel, other=0).to(tl.int32)
    tl.store(packed + byte, tl.sum(bit << place, 1).to(tl.uint8), mask=byte * 8 < numel)


@triton.jit(do_not_specialize=["numel"])
def _unpack(packed, bits, numel, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits + entry, bit_of(packed, entry, numel).to(tl.uint8), mask=entry < numel)


@triton.jit(do_not_specialize=["numel", "blocks"])
def _popcount(packed, counts, numel, blocks, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """counts[block] = how many bits of it are set; those behind the last entry do not count."""
    block = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    byte = block[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    entries = tl.minimum(tl.maximum(numel - byte * 8, 0), 8).to(tl.int32)
    value = tl.load(packed + byte, mask=entries > 0, other=0).to(tl.int32) & ((1 << entries) - 1)
    value -= (value >> 1) & 0x55
    value = (value & 0x33) + ((value >> 2) & 0x33)
    tl.store(counts + block, tl.sum((value + (value >> 4)) & 0x0F, 1), mask=block < blocks)


@triton.jit(do_not_specialize=["numel", "count"])
def _list(packed, ends, found, numel, count, BLOCK: tl.constexpr):
    entry, kept, slot = listed(packed, ends, numel, count, BLOCK)
    tl.store(found + slot, entry, mask=kept)


@triton.jit
def listed(packed, ends, numel, count, BLOCK: tl.constexpr):
    """Return the entries of the program's block, whether each is one of the first `count` set bits, and its
    number among the set bits."""
    block = tl.program_id(0).to(tl.int64)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    bit = bit_of(packed, entry, numel)
    slot = tl.load(ends + block - 1, mask=block > 0, other=0) + tl.cumsum(bit, 0) - 1
    return entry, (bit > 0) & (slot < count), slot


@triton.jit
def bit_of(packed, entry, numel):
    """0 or 1 for each entry; 0 from `numel` on."""
    byte = tl.load(packed + entry // 8, mask=entry < numel, other=0).to(tl.int32)
    return (byte >> (entry % 8).to(tl.int32)) & 1


def copy_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.copy_bits`: the bits, as they are."""
    return packed.clone()


def gather(x: Tensor, entries: Tensor, count: int) -> Tensor:
    bits, numel = as_integers(x.detach()), x.numel()
    values = bits.new_empty(count)
    if not count:
        return values.view(x.dtype)
    overflow = torch.zeros(1, dtype=torch.int32, device=x.device)
    infinity = INFINITY[x.dtype]
    nan = torch.tensor(math.nan, dtype=x.dtype, device="cpu").view(bits.dtype).item()
    block = BLOCK
    with torch.cuda.device_of(x):
        if entries.dtype == torch.uint8:
            ends = block_ends(entries, numel)
            _compress[(len(ends),)](
                bits, entries, ends, values, overflow, numel, count, INFINITY=infinity, BLOCK=block
            )
            _fill_nan[(triton.cdiv(count, block),)](
                values, ends, overflow, len(ends), count, NAN=nan, BLOCK=block
            )
        else:
            _scan_finite[(triton.cdiv(numel, block * SCANNED),)](
                bits, overflow, numel, INFINITY=infinity, BLOCK=block, TILES=SCANNED
            )
            _gather[(triton.cdiv(count, block),)](
                bits, entries, overflow, values, count, NAN=nan, BLOCK=block
            )
    return values.view(x.dtype)


def scatter(values: Tensor, entries: Tensor, shape: tuple[int, ...]) -> Tensor:
    if entries.dtype != torch.uint8:
        return reference.scatter(values, entries, shape)
    bits = as_integers(values)
    out = bits.new_empty(shape)
    numel = out.numel()
    if numel:
        with torch.cuda.device_of(values):
            ends = block_ends(entries, numel)
            _expand[(len(ends),)](bits, entries, ends, out, numel, bits.numel(), BLOCK=BLOCK)
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
def _fill_nan(values, ends, overflow, blocks, count, NAN: tl.constexpr, BLOCK: tl.constexpr):
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
def _scan_finite(bits, overflow, numel, INFINITY: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
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
