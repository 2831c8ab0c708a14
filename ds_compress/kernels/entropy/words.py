"""The words of a code, as `format` draws them: written and read in PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.code_plan import CodePlan, frequencies_of
from ds_compress.kernels.entropy.format import (
    HEAD,
    LEVELS,
    NOT_FINITE,
    REACHES,
    SHIFTS,
    START,
    STEPS,
    SYMBOLS,
    TOTAL,
    CodeLayout,
)
from ds_compress.kernels.entropy.rans import Coder


def write_words(
    coder: Coder,
    chosen: CodePlan,
    symbols: Tensor,
    escapes: Tensor,
    exponent: Tensor,
    shift: Tensor,
    frame: CodeLayout,
) -> tuple[Tensor, Tensor]:
    """Return the words of a code, int16 [frame.words], and whether they fit.

    Args:
        symbols: int16 [numel], those of table t from t * SYMBOLS on.
        escapes: int16 [numel]: the word of each value, of which those that are beyond travel.
        exponent: as in the head.
        shift: int64 [tables].
    """
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    beyond = above + below + 1
    symbol = torch.arange(SYMBOLS, dtype=torch.int64, device=symbols.device)
    frequencies = frequencies_of(symbol, chosen)
    coded = coder.encode(symbols, frequencies, frame)

    # the last: for what has no place
    words = torch.zeros(frame.words + 1, dtype=torch.int64, device=symbols.device)
    states = coded.states.flatten()
    sizes = coded.written.sum((1, 2))
    for number, start in ((states, 0), (sizes, 2 * len(states))):
        end = start + 2 * len(number)
        words[start:end:2], words[start + 1 : end : 2] = number & 0xFFFF, number >> 16
    words[frame.head : frame.head + HEAD] = torch.stack([exponent.long(), chosen.step])
    reaches = [above.squeeze(1) << 8 | below.squeeze(1), shift]
    words[frame.head + HEAD : frame.tables] = torch.stack(reaches, dim=1).flatten()
    ends = frame.tables + beyond.cumsum(0)
    place = ends - beyond + _place(symbol, below)
    place = torch.where((symbol == below) | (symbol > beyond), frame.words, place)
    words.scatter_(0, place.flatten().clamp(0, frame.words), frequencies.flatten())
    words = words[:-1].to(torch.int16)
    place = torch.arange(frame.words, dtype=torch.int32, device=symbols.device)
    escaped = (symbol == beyond).flatten().index_select(0, symbols.int())
    # a search finds the value whose word comes to a place; to scatter all would take indices of 64 bits
    for number, is_sent, each in (
        (place - ends[-1, 0].int() + 1, coded.written, coded.words),
        (frame.words - place, escaped, escapes),
    ):
        sent = is_sent.flatten().cumsum(0, dtype=torch.int32)
        source = torch.searchsorted(sent, number, out_int32=True).clamp_(max=len(sent) - 1)
        has_one = (number > 0) & (number <= sent[-1])
        words = torch.where(has_one, each.flatten().index_select(0, source), words)
    fits = ends[-1, 0] + chosen.escapes.sum() + sizes.sum() <= frame.words
    return words, fits


class Symbols(NamedTuple):
    """What the words of a code say."""

    exponent: Tensor
    """int64: within 1 .. NOT_FINITE if `valid`."""

    step: Tensor
    """int64: j, within 0 .. STEPS - 1."""

    shift: Tensor
    """int64 [tables]."""

    q: Tensor
    """int64 [tables, SYMBOLS]: of each symbol."""

    numbers: Tensor
    """int32 [numel]: the symbol of each value, those of table t from t * SYMBOLS on."""

    escaped: Tensor
    """bool [numel]: whether the value is sent as an escape word."""

    places: Tensor
    """int32 [numel]: the place of the escape word of each escaped value."""

    escapes: Tensor
    """int32 [frame.words]: the escape words where they are; elsewhere 1, which may be one."""

    valid: Tensor
    """bool: whether an encoder can have produced these words."""

    def find(self, by_symbol: Tensor, by_escape: Tensor) -> Tensor:
        """Return what each value stands for, [numel], by its symbol or by its escape word."""
        escapes = by_escape.index_select(0, self.places)
        return torch.where(self.escaped, escapes, by_symbol.flatten().index_select(0, self.numbers))


def read_words(coder: Coder, words: Tensor, frame: CodeLayout, classes: Tensor | None = None) -> Symbols:
    """Read what `write_words` wrote; whatever comes, nothing outside `words` is read.

    Args:
        words: int16 [frame.words].
        classes: int32 [numel], below frame.classes: the class of each value; None if there is one.
    """
    head = words[frame.head : frame.tables].long()
    exponent, step, reaches = head[0], head[1], head[HEAD:].view(-1, REACHES)
    reach, shift = torch.stack([reaches[:, 0] >> 8, reaches[:, 0] & 255], dim=1), reaches[:, 1]
    top = LEVELS[-1]
    valid = (exponent >= 1) & (exponent <= NOT_FINITE) & (step >= 0) & (step < STEPS)
    valid &= ((reach >= 0) & (reach <= top)).all() & ((shift >= SHIFTS[0]) & (shift <= SHIFTS[1])).all()
    step, reach = step.clamp(0, STEPS - 1), reach.clamp(0, top)
    above, below = reach.unsqueeze(2).unbind(1)

    unsigned = words.int() & 0xFFFF
    symbol = torch.arange(SYMBOLS, dtype=torch.int64, device=words.device)
    beyond = above + below + 1
    ends = frame.tables + beyond.cumsum(0)
    frequencies = unsigned[(ends - beyond + _place(symbol, below)).clamp_(max=frame.words - 1)].long()
    frequencies = torch.where((symbol == below) | (symbol > beyond), 0, frequencies)
    rest = TOTAL - frequencies.sum(1, keepdim=True)
    valid &= (rest > 0).all()
    frequencies = torch.where(symbol == below, torch.where(valid, rest, TOTAL), frequencies * valid)

    head = words[: frame.head].view(torch.int32).long()
    states, sizes = head.split([frame.blocks * frame.lanes, frame.blocks])
    first, ends = ends[-1, 0], sizes.cumsum(0)
    room = frame.words - first
    valid &= (sizes >= 0).all() & (ends[-1] <= room)
    places = (first + ends - sizes).clamp(0, frame.words)
    states = (states & 0xFFFFFFFF).view(frame.blocks, frame.lanes)
    symbols, left, states = coder.decode(states, unsigned, places, frequencies, frame, classes)
    valid &= (left == places + sizes).all() & (states == START).all()

    numbers = symbols.int()
    escaped = (symbol == beyond).flatten().index_select(0, numbers)
    places = frame.words - escaped.cumsum(0, dtype=torch.int32)
    valid &= places[-1] >= first + ends[-1]
    place = torch.arange(frame.words, dtype=torch.int32, device=words.device)
    escapes = torch.where(place >= places[-1], unsigned, 1)
    places = places.clamp_(0, frame.words - 1)
    return Symbols(exponent, step, shift, symbol - below, numbers, escaped, places, escapes, valid)


def _place(symbol: Tensor, below: Tensor) -> Tensor:
    """Return the place of a symbol's frequency in the table, which does not contain that of q = 0."""
    return symbol - (symbol > below).long()
