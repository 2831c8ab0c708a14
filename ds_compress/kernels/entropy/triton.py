"""Entropy coding on a GPU: one launch codes all blocks, one program per block; the rest is PyTorch.

PyTorch makes a few passes over the keys, and most of its launches, about 1,000 to encode and 150 to 200 to
decode a message, on the histogram. The host does not wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.entropy.format import SCALE_BITS, START, CodeLayout
from ds_compress.kernels.entropy.rans import Coded, Coder, slots
from ds_compress.kernels.entropy.reference import EntropyCoding

__all__ = ["decode_entropy", "encode_entropy"]


def rans_encode(symbols: Tensor, frequencies: Tensor, frame: CodeLayout) -> Coded:
    """See `rans.rans_encode`."""
    shape = frame.blocks, frame.steps, frame.lanes
    states = torch.empty(frame.blocks, frame.lanes, dtype=torch.int64, device=symbols.device)
    words = torch.empty(shape, dtype=torch.int16, device=symbols.device)
    written = torch.empty(shape, dtype=torch.bool, device=symbols.device)
    starts = frequencies.cumsum(1) - frequencies
    with torch.cuda.device_of(symbols):
        _encode[(frame.blocks,)](
            symbols,
            frequencies.contiguous(),
            starts,
            states,
            words,
            written.view(torch.int8),
            frame.numel,
            frame.steps,
            LANES=frame.lanes,
            START=START,
            SCALE_BITS=SCALE_BITS,
            num_warps=1,
        )
    return Coded(states, words, written)


def rans_decode(
    states: Tensor,
    words: Tensor,
    places: Tensor,
    frequencies: Tensor,
    frame: CodeLayout,
    classes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rans.rans_decode`."""
    symbol_of, size_of, offset_of = slots(frequencies)
    symbols = torch.zeros(frame.numel, dtype=torch.int16, device=words.device)
    ends, left = torch.empty_like(states), torch.empty_like(places)
    with torch.cuda.device_of(words):
        _decode[(frame.blocks,)](
            states.contiguous(),
            words,
            places,
            symbol_of,
            size_of,
            offset_of,
            classes,
            symbols,
            left,
            ends,
            frame.numel,
            frame.steps,
            len(words) - 1,
            LANES=frame.lanes,
            START=START,
            SCALE_BITS=SCALE_BITS,
            num_warps=1,
        )
    return symbols, left, ends


_coding = EntropyCoding(Coder(rans_encode, rans_decode))
encode_entropy, decode_entropy = _coding.encode_entropy, _coding.decode_entropy


@triton.jit(do_not_specialize=["numel", "steps"])
def _encode(
    symbols,
    frequencies,
    starts,
    states,
    words,
    written,
    numel,
    steps,
    LANES: tl.constexpr,
    START: tl.constexpr,
    SCALE_BITS: tl.constexpr,
):
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    state = tl.full([LANES], START, tl.int64)
    for i in range(steps):
        place = (block * steps + (steps - 1 - i)) * LANES + lane
        exists = place < numel
        symbol = tl.load(symbols + place, mask=exists, other=0).to(tl.int32)
        f = tl.where(exists, tl.load(frequencies + symbol), 1 << SCALE_BITS)
        start = tl.where(exists, tl.load(starts + symbol), 0)
        full = (state >> 20) >= f
        tl.store(words + place, state.to(tl.int16))
        tl.store(written + place, full.to(tl.int8))
        state = tl.where(full, state >> 16, state)
        state = ((state // f) << SCALE_BITS) + state % f + start
    tl.store(states + block * LANES + lane, state)


@triton.jit(do_not_specialize=["numel", "steps", "last"])
def _decode(
    states,
    words,
    places,
    symbol_of,
    size_of,
    offset_of,
    classes,
    symbols,
    left,
    ends,
    numel,
    steps,
    last,
    LANES: tl.constexpr,
    START: tl.constexpr,
    SCALE_BITS: tl.constexpr,
):
    """No place of `words` beyond the last one is read, however many a damaged block asks for."""
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    state, place = tl.load(states + block * LANES + lane), tl.load(places + block)
    for step in range(steps):
        value = (block * steps + step) * LANES + lane
        exists = value < numel
        slot = state & ((1 << SCALE_BITS) - 1)
        if classes is not None:
            slot += tl.load(classes + value, mask=exists, other=0) << SCALE_BITS
        tl.store(symbols + value, tl.load(symbol_of + slot).to(tl.int16), mask=exists)
        fed = tl.load(size_of + slot) * (state >> SCALE_BITS) + tl.load(offset_of + slot)
        state = tl.where(exists, fed, state)
        empty = exists & (state < START)
        rank = tl.cumsum(empty.to(tl.int32), 0)
        word = tl.load(words + tl.minimum(tl.maximum(place + rank - 1, 0), last), mask=empty, other=0)
        state = tl.where(empty, (state << 16) | word, state)
        place += tl.sum(empty.to(tl.int32), 0)
    tl.store(left + block, place)
    tl.store(ends + block * LANES + lane, state)
