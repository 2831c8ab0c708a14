"""Interleaved rANS in PyTorch: the specification."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import SCALE_BITS, START, TOTAL, CodeLayout


class Coded(NamedTuple):
    states: Tensor
    """int64 [blocks, lanes]: where the decoder starts."""

    words: Tensor
    """int16 [blocks, steps, lanes]: what each value made its lane write, in the order of the decoder."""

    written: Tensor
    """bool [blocks, steps, lanes]: whether the lane wrote a word at that step."""


def rans_encode(symbols: Tensor, frequencies: Tensor, frame: CodeLayout) -> Coded:
    """Encode symbols with interleaved rANS, in a loop over the steps of all lanes of all blocks.

    Args:
        symbols: int16 [numel], those of table t from t * SYMBOLS on.
        frequencies: int64 [tables, SYMBOLS], which add up to TOTAL in each; none is 0 of a symbol that
            occurs.
    """
    spread = _dealt(symbols.long(), frame, fill=frequencies.numel())
    # behind the last value: a symbol that is certain changes nothing
    size = torch.nn.functional.pad(frequencies.flatten(), (0, 1), value=TOTAL)
    start = torch.nn.functional.pad((frequencies.cumsum(1) - frequencies).flatten(), (0, 1))
    size, start = size[spread], start[spread]
    state = torch.full_like(size[:, 0], START)
    words, written = torch.empty_like(spread, dtype=torch.int16), torch.empty_like(spread, dtype=torch.bool)
    for step in reversed(range(frame.steps)):
        f = size[:, step]
        full = (state >> 20) >= f  # the next state would not fit in 32 bits
        words[:, step], written[:, step] = state & 0xFFFF, full
        state = torch.where(full, state >> 16, state)
        state = (torch.div(state, f, rounding_mode="floor") << SCALE_BITS) + state % f + start[:, step]
    return Coded(state, words, written)


def rans_decode(
    states: Tensor,
    words: Tensor,
    places: Tensor,
    frequencies: Tensor,
    frame: CodeLayout,
    classes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode what `rans_encode` encoded. Whatever the arguments hold, nothing outside `words` is read.

    Args:
        states: int64 [blocks, lanes], each below 2^32.
        words: int32 [any], each below 2^16.
        places: int64 [blocks]: where the first word of each block is.
        frequencies: int64 [tables, SYMBOLS], at least 0, which add up to TOTAL in each.
        classes: int32 [numel]: the class of each value; None if there is one.

    Returns:
        Symbols as of `rans_encode`, int16 [numel]; the place after the last word that each block read, int64
        [blocks], maybe behind the last word; the last states of the lanes, int64 [blocks, lanes].
    """
    device = words.device
    symbol_of, size_of, offset_of = slots(frequencies)
    exists = _dealt(torch.ones(frame.numel, dtype=torch.bool, device=device), frame, fill=0)
    symbols = torch.empty(exists.shape, dtype=torch.int16, device=device)
    state, place, last = states, places.unsqueeze(1), len(words) - 1
    if classes is None:
        classes = torch.zeros(frame.numel, dtype=torch.int32, device=device)
    tables = _dealt(classes, frame, fill=0)
    for step in range(frame.steps):
        there, slot = exists[:, step], (state & (TOTAL - 1)) + TOTAL * tables[:, step]
        symbols[:, step] = symbol_of[slot]
        state = torch.where(there, size_of[slot] * (state >> SCALE_BITS) + offset_of[slot], state)
        empty = there & (state < START)
        rank = empty.cumsum(1)
        word = words[(place + rank - 1).clamp_(0, last)]
        state = torch.where(empty, state << 16 | word, state)
        place = place + rank[:, -1:]
    return symbols.view(-1)[: frame.numel], place.squeeze(1), state


def slots(frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tables, int64 [tables * TOTAL], by the low bits of a state: symbol, its frequency, and
    its offset in that frequency."""
    each, size = frequencies.flatten(), len(frequencies) * TOTAL
    numbers = torch.arange(each.numel(), dtype=torch.int64, device=each.device)
    symbol_of = torch.repeat_interleave(numbers, each, output_size=size)
    starts = each.cumsum(0) - each
    offset_of = torch.arange(size, dtype=torch.int64, device=each.device) - starts[symbol_of]
    return symbol_of, each[symbol_of], offset_of


def _dealt(values: Tensor, frame: CodeLayout, fill: int) -> Tensor:
    """Return `values` [numel] as [blocks, steps, lanes], padded with `fill`."""
    missing = frame.blocks * frame.length - frame.numel
    padded = torch.nn.functional.pad(values, (0, missing), value=fill)
    return padded.view(frame.blocks, frame.steps, frame.lanes)


class Coder(NamedTuple):
    """Functions of a backend that coding is made of."""

    encode: Callable[[Tensor, Tensor, CodeLayout], Coded]
    decode: Callable[..., tuple[Tensor, Tensor, Tensor]]
