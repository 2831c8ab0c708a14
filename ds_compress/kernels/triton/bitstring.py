"""Bit strings on a GPU: `indices.pack_bits`, `unpack_bits` and `positions`, equal to plain torch entry by entry."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.triton import selection

BLOCK = 4096


def pack_bits(bits: Tensor) -> Tensor:
    """See `indices.pack_bits`."""
    bits = bits.contiguous().view(torch.uint8)
    packed = bits.new_empty(triton.cdiv(bits.numel(), 8))
    if bits.numel():
        with torch.cuda.device_of(bits):
            _pack[(triton.cdiv(bits.numel(), BLOCK),)](bits, packed, bits.numel(), BLOCK=BLOCK)
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """See `indices.unpack_bits`."""
    bits = packed.new_empty(numel)
    if numel:
        with torch.cuda.device_of(packed):
            _unpack[(triton.cdiv(numel, BLOCK),)](packed.contiguous(), bits, numel, BLOCK=BLOCK)
    return bits.view(torch.bool)


def positions(mask: Tensor, count: int) -> Tensor:
    """See `indices.positions`."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    keys = mask.contiguous().view(torch.uint8).unsqueeze(0)
    return selection.compact(keys, torch.ones(1, 1, dtype=torch.int32, device=mask.device), count, spread=False)


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
    byte = tl.load(packed + entry // 8, mask=entry < numel, other=0).to(tl.int32)
    tl.store(bits + entry, ((byte >> (entry % 8).to(tl.int32)) & 1).to(tl.uint8), mask=entry < numel)
