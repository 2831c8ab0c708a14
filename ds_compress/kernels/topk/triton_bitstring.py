"""Bit strings on a GPU, equal to plain torch entry by entry.

What lists or moves the entries of set bits has to know how many come before a block: one read of the bits
counts them block by block, and a running sum adds them up (`block_ends`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.topk.bitstring import marked

BLOCK = 4096
"""Entries of one program, a multiple of 8."""

TILES = 16  # blocks whose bits one program counts


def pack_bits(bits: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    bits = bits.contiguous().view(torch.uint8)
    packed = bits.new_empty(triton.cdiv(bits.numel(), 8))
    if bits.numel():
        with torch.cuda.device_of(bits):
            _pack[(triton.cdiv(bits.numel(), BLOCK),)](bits, packed, bits.numel(), BLOCK=BLOCK)
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """See `reference.unpack_bits`."""
    bits = packed.new_empty(numel)
    if numel:
        with torch.cuda.device_of(packed):
            _unpack[(triton.cdiv(numel, BLOCK),)](packed.contiguous(), bits, numel, BLOCK=BLOCK)
    return bits.view(torch.bool)


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """See `reference.set_bits`."""
    return pack_bits(marked(indices, numel))


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
    _popcount[(triton.cdiv(blocks, TILES),)](packed, counts, numel, blocks, BLOCK=BLOCK, TILES=TILES)
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
    """The entries of the program's block, whether each is set and among the first `count` that are, and which
    of them."""
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
