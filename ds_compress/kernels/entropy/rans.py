"""Interleaved rANS in PyTorch, on the CPU in numpy: the specification."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import SCALE_BITS, START, SYMBOLS, TOTAL, CodeLayout


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
    dealt = _dealt(symbols, frame, fill=frequencies.numel()).int()
    # behind the last value: a symbol that is certain changes nothing
    sizes = torch.nn.functional.pad(frequencies.flatten(), (0, 1), value=TOTAL)
    starts = torch.nn.functional.pad((frequencies.cumsum(1) - frequencies).flatten(), (0, 1))
    of_symbols = (table.index_select(0, dealt.flatten()).view(dealt.shape) for table in (sizes, starts))
    memory = torch.empty_like(dealt, dtype=torch.int16), torch.empty_like(dealt, dtype=torch.bool)
    arrays = _array_library(symbols)
    size, start, words, written = map(arrays.asarray, (*of_symbols, *memory))
    state = arrays.full_like(size[0], START)
    for step in reversed(range(frame.steps)):
        f = size[step]
        full = (state >> 20) >= f  # the next state would not fit in 32 bits
        words[step], written[step] = state & 0xFFFF, full
        state = arrays.where(full, state >> 16, state)
        state = (state // f << SCALE_BITS) + state % f + start[step]
    state = torch.as_tensor(state, dtype=torch.int64, device=symbols.device)
    return Coded(state, *(each.transpose(0, 1) for each in memory))


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
    if classes is None:
        classes = torch.zeros(frame.numel, dtype=torch.int32, device=words.device)
    # behind the last value: a table of one symbol, which changes no state
    certain = torch.nn.functional.pad(torch.full_like(frequencies[:1, :1], TOTAL), (0, SYMBOLS - 1))
    tables = _dealt(classes, frame, fill=len(frequencies))
    # a word before the first one, and behind the last one what damaged sizes may reach
    padded = torch.nn.functional.pad(words.long(), (1, frame.length))
    memory = torch.empty_like(tables, dtype=torch.int16)
    inputs = states, places.unsqueeze(1), padded, tables < len(frequencies), (tables << SCALE_BITS).long()
    arrays = _array_library(words)
    state, place, word_at, exists, table, symbols = map(arrays.asarray, (*inputs, memory))
    symbol_of, size_of, offset_of = map(arrays.asarray, slots(torch.cat([frequencies, certain])))
    for step in range(frame.steps):
        slot = (state & TOTAL - 1) + table[step]
        symbols[step] = symbol_of.take(slot)
        state = size_of.take(slot) * (state >> SCALE_BITS) + offset_of.take(slot)
        empty = (state < START) & exists[step]
        place = place[:, -1:] + empty.cumsum(1)
        state = arrays.where(empty, state << 16 | word_at.take(place), state)
    numbers = memory.transpose(0, 1).flatten()[: frame.numel]
    ends = place[:, -1], state
    left, states = (torch.as_tensor(each, dtype=torch.int64, device=words.device) for each in ends)
    return numbers, left, states


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
    """Return `values` [numel] as [steps, blocks, lanes], padded with `fill`."""
    missing = frame.blocks * frame.length - frame.numel
    padded = torch.nn.functional.pad(values, (0, missing), value=fill)
    return padded.view(frame.blocks, frame.steps, frame.lanes).transpose(0, 1).contiguous()


def _array_library(tensor: Tensor) -> Any:
    """Return what the loops compute with: PyTorch, on the CPU numpy in the same memory: its operations on a
    few hundred numbers take a third of the time or less."""
    return np if tensor.is_cpu else torch


class Coder(NamedTuple):
    """Functions of a backend that coding is made of."""

    encode: Callable[[Tensor, Tensor, CodeLayout], Coded]
    decode: Callable[..., tuple[Tensor, Tensor, Tensor]]
