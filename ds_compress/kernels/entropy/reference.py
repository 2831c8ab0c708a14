"""Entropy coding by `format` in PyTorch: the specification.

The search for a step uses the histogram of a message's keys, not the data. The cost of a symbol is that of an
ideal coder. A symbol of frequency f grows the state x of a lane, at least 2^16 = 16 * 4096 / 4096, to less
than (4096 x / f) * (1 + f / x), and x / f is at least 16 then. So its log2 grows by the cost and at most
log2(17 / 16), SURE, and each word written takes 16 off. It starts at 16 and never ends below, so a lane
writes no more words than a sixteenth of what its symbols cost, SURE included. That proves that a plan which
is `sure` fits; in practice the 16 bits of the states more than pay for it.

Everything is a tensor, so that the host does not wait for a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import (
    CLASS_BITS,
    CLASSES,
    COST_BITS,
    FINER,
    HEAD,
    HIGHEST,
    KEYS,
    LEVELS,
    LOWEST,
    NOT_FINITE,
    PER_OCTAVE,
    PER_WORD,
    REACHES,
    SCALE_BITS,
    SHIFT_BITS,
    SHIFTS,
    START,
    STEPS,
    SURE,
    SYMBOLS,
    TOTAL,
    Frame,
    SortedBlocks,
    Tables,
    tables,
)

__all__ = ["decode_entropy", "decode_sorted", "encode_entropy", "encode_sorted"]

_MAGNITUDE = 0x7FFFFFFF
_KEY_SHIFT = 15  # the digits of a float that its key leaves out


class Coded(NamedTuple):
    states: Tensor
    """int64 [blocks, lanes]: where the decoder starts."""

    words: Tensor
    """int32 [blocks, steps, lanes]: what each value made its lane write, in the order of the decoder."""

    written: Tensor
    """bool, as words: whether it did."""


def rans_encode(symbols: Tensor, frequencies: Tensor, frame: Frame) -> Coded:
    """Encode symbols with interleaved rANS, in a loop over the steps of all lanes of all blocks.

    Args:
        symbols: int64 [numel], those of context c from c * SYMBOLS on.
        frequencies: int64 [contexts, SYMBOLS], which add up to TOTAL in each; none is 0 of a symbol that
            occurs.
    """
    spread = _dealt(symbols, frame, fill=frequencies.numel())
    # behind the last value: a symbol that is certain changes nothing
    size = torch.nn.functional.pad(frequencies.flatten(), (0, 1), value=TOTAL)
    start = torch.nn.functional.pad((frequencies.cumsum(1) - frequencies).flatten(), (0, 1))
    size, start = size[spread], start[spread]
    state = torch.full_like(size[:, 0], START)
    words, written = torch.empty_like(spread, dtype=torch.int32), torch.empty_like(spread, dtype=torch.bool)
    for step in reversed(range(frame.steps)):
        f = size[:, step]
        full = (state >> 20) >= f  # the next state would not fit in 32 bits
        words[:, step], written[:, step] = state & 0xFFFF, full
        state = torch.where(full, state >> 16, state)
        state = (torch.div(state, f, rounding_mode="floor") << SCALE_BITS) + state % f + start[:, step]
    return Coded(state, words, written)


def rans_decode(
    states: Tensor, words: Tensor, places: Tensor, frequencies: Tensor, frame: Frame
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode what `rans_encode` encoded. Whatever the arguments hold, nothing outside `words` is read.

    Args:
        states: int64 [blocks, lanes], each below 2^32.
        words: int32 [any], each below 2^16.
        places: int64 [blocks]: where the first word of each block is.
        frequencies: int64 [contexts, SYMBOLS], at least 0, which add up to TOTAL in each.

    Returns:
        Symbols as of `rans_encode`, int16 [numel]; the place after the last word that each block read, int64
        [blocks], maybe behind the last word; the last states of the lanes, int64 [blocks, lanes].
    """
    device = words.device
    symbol_of, size_of, offset_of = slots(frequencies)
    exists = _dealt(torch.ones(frame.numel, dtype=torch.bool, device=device), frame, fill=0)
    symbols = torch.empty(exists.shape, dtype=torch.int16, device=device)
    state, place, last = states, places.unsqueeze(1), len(words) - 1
    tables = TOTAL * contexts_of(frame, device).view(frame.blocks, frame.steps, 1)
    for step in range(frame.steps):
        there, slot = exists[:, step], (state & (TOTAL - 1)) + tables[:, step]
        symbols[:, step] = symbol_of[slot]
        state = torch.where(there, size_of[slot] * (state >> SCALE_BITS) + offset_of[slot], state)
        empty = there & (state < START)
        rank = empty.cumsum(1)
        word = words[(place + rank - 1).clamp_(0, last)]
        state = torch.where(empty, state << 16 | word, state)
        place = place + rank[:, -1:]
    return symbols.view(-1)[: frame.numel], place.squeeze(1), state


def slots(frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tables, int64 [contexts * TOTAL], by the low bits of a state: symbol, its frequency, and
    its offset in that frequency."""
    each, size = frequencies.flatten(), len(frequencies) * TOTAL
    numbers = torch.arange(each.numel(), dtype=torch.int64, device=each.device)
    symbol_of = torch.repeat_interleave(numbers, each, output_size=size)
    starts = each.cumsum(0) - each
    offset_of = torch.arange(size, dtype=torch.int64, device=each.device) - starts[symbol_of]
    return symbol_of, each[symbol_of], offset_of


def contexts_of(frame: Frame, device: torch.device) -> Tensor:
    """Return the context of the values of each step, int64 [blocks * steps]."""
    found = torch.zeros(frame.blocks * frame.steps, dtype=torch.int64, device=device)
    for end in frame.ends[:-1]:
        found[end // frame.lanes :] += 1
    return found


def _dealt(values: Tensor, frame: Frame, fill: int) -> Tensor:
    """Return `values` [numel] as [blocks, steps, lanes], padded with `fill`."""
    missing = frame.blocks * frame.length - frame.numel
    padded = torch.nn.functional.pad(values, (0, missing), value=fill)
    return padded.view(frame.blocks, frame.steps, frame.lanes)


class CodePlan(NamedTuple):
    """How a message is coded with a step."""

    step: Tensor
    """int64: j."""

    reach: Tensor
    """int64 [contexts, 2]: above and below."""

    first: Tensor
    """int64 [128]: the first key of q = 1 .. 128."""

    frequencies: Tensor
    """int64 [contexts, 2, 127]: of q = 1 .. 127, and of -1 .. -127; 0 beyond `reach`."""

    beyond: Tensor
    """int64 [contexts]: the frequency of what is beyond."""

    escapes: Tensor
    """int64 [contexts]: how many values are beyond."""

    words: Tensor
    """int64: what tables, escapes and code take, the last to within SURE a symbol."""


class Coder(NamedTuple):
    """Functions of a backend that coding is made of."""

    encode: Callable[[Tensor, Tensor, Frame], Coded]
    decode: Callable[[Tensor, Tensor, Tensor, Tensor, Frame], tuple[Tensor, Tensor, Tensor]]


_CODER = Coder(rans_encode, rans_decode)


def encode_entropy(x: Tensor, frame: Frame) -> Tensor:
    """Return the words, int16 [frame.words], of `x`, [frame.numel] of any float dtype."""
    return encode_with(_CODER, x, frame)


def decode_entropy(words: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode `words`.

    Returns:
        The values, [frame.numel] of `dtype`; and whether `words` are a possible code, a bool of one element.
        If not, all values are nan.
    """
    return decode_with(_CODER, words, frame, dtype)


def encode_with(coder: Coder, x: Tensor, frame: Frame) -> Tensor:
    """Do it with the functions of a backend."""
    bits = x.float().view(torch.int32)
    exponent = ((bits & _MAGNITUDE).amax() >> 23).clamp(min=1)
    keys = _keys(bits, exponent)
    for end in frame.ends[:-1]:
        keys[end:] += 2 * KEYS  # those of the next context
    histogram = torch.zeros(frame.contexts * 2 * KEYS, dtype=torch.int64, device=x.device)
    histogram = histogram.index_add_(0, keys, torch.ones_like(keys)).view(frame.contexts, 2, KEYS)
    words, fits = _words(coder, keys, exponent, histogram, frame, sure=False)
    if not (x.device.type == "cpu" and fits):  # the host of a GPU does not ask
        words = torch.where(fits, words, _words(coder, keys, exponent, histogram, frame, sure=True)[0])
    overflow = torch.zeros_like(words)
    overflow[frame.head] = NOT_FINITE
    return torch.where(exponent == NOT_FINITE, overflow, words)


def decode_with(coder: Coder, words: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Do it with the functions of a backend."""
    head = words[frame.head : frame.tables].long()
    exponent, step, reaches = head[0], head[1], head[HEAD:].view(-1, REACHES)
    reach, shift = torch.stack([reaches[:, 0] >> 8, reaches[:, 0] & 255], dim=1), reaches[:, 1]
    finite, top = exponent != NOT_FINITE, LEVELS[-1]
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

    states, sizes = (
        words[: frame.head].view(torch.int32).long().split([frame.blocks * frame.lanes, frame.blocks])
    )
    first, ends = ends[-1, 0], sizes.cumsum(0)
    room = frame.words - first
    valid &= (sizes >= 0).all() & (ends[-1] <= room)
    places = (first + ends - sizes).clamp(0, frame.words)
    states = (states & 0xFFFFFFFF).view(frame.blocks, frame.lanes)
    symbols, left, states = coder.decode(states, unsigned, places, frequencies, frame)
    valid &= (left == places + sizes).all() & (states == START).all()

    numbers = symbols.int()
    escaped = (symbol == beyond).flatten()[numbers]
    rank = escaped.cumsum(0)
    valid &= rank[-1] <= room - ends[-1]
    escapes = unsigned[(frame.words - rank).clamp_(0, frame.words - 1)]
    key = escapes & 0x7FFF
    valid &= ((key < KEYS) & (key > 0) | ~escaped).all()
    value = torch.where(
        escaped, _middle(key, escapes >> 15), _values(symbol - below, step, shift).flatten()[numbers]
    )
    value = value * (exponent.clamp(1, NOT_FINITE - 1).int() << 23).view(torch.float32)
    return torch.where(valid & finite, value, torch.nan).to(dtype), valid | ~finite


def _keys(bits: Tensor, exponent: Tensor) -> Tensor:
    """Return the keys, int64 [numel], of the floats of these bits; negative ones have KEYS more."""
    scale = ((255 - exponent) << 23).view(torch.float32)  # to [2, 4): neither it nor a result is subnormal
    scaled = ((bits & _MAGNITUDE).view(torch.float32) * scale).view(torch.int32)
    keys = ((scaled >> _KEY_SHIFT) - (LOWEST + 1) * PER_OCTAVE).clamp_(0, KEYS - 1)
    return keys.long() + KEYS * (bits < 0)


def _words(
    coder: Coder, keys: Tensor, exponent: Tensor, histogram: Tensor, frame: Frame, sure: bool
) -> tuple[Tensor, Tensor]:
    """Return the words by the plan of `search`, and whether they fit."""
    chosen = search(histogram, frame, sure)
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    beyond = above + below + 1
    symbol = torch.arange(SYMBOLS, dtype=torch.int64, device=keys.device)
    frequencies = _frequencies(symbol, chosen)
    symbols = _symbol_of(chosen)[keys]
    coded = coder.encode(symbols, frequencies, frame)

    # the last: for what has no place
    words = torch.zeros(frame.words + 1, dtype=torch.int64, device=keys.device)
    states = coded.states.flatten()
    sizes = coded.written.sum((1, 2))
    for number, start in ((states, 0), (sizes, 2 * len(states))):
        end = start + 2 * len(number)
        words[start:end:2], words[start + 1 : end : 2] = number & 0xFFFF, number >> 16
    words[frame.head : frame.head + HEAD] = torch.stack([exponent.long(), chosen.step])
    reaches = [above.squeeze(1) << 8 | below.squeeze(1), shift_of(histogram, chosen)]
    words[frame.head + HEAD : frame.tables] = torch.stack(reaches, dim=1).flatten()
    ends = frame.tables + beyond.cumsum(0)
    place = ends - beyond + _place(symbol, below)
    place = torch.where((symbol == below) | (symbol > beyond), frame.words, place)
    _put(words, place.flatten(), frequencies.flatten())
    order = coded.written.flatten().cumsum(0) - 1
    place = torch.where(coded.written.flatten(), ends[-1, 0] + order, frame.words)
    _put(words, place, coded.words.flatten())
    escaped = (symbol == beyond).flatten()[symbols]
    place = torch.where(escaped, frame.words - escaped.cumsum(0), frame.words)
    side, key = keys // KEYS % 2, keys % KEYS
    _put(words, place, key + (side << 15))
    fits = ends[-1, 0] + chosen.escapes.sum() + sizes.sum() <= frame.words
    return words[:-1].to(torch.int16), fits


def _put(words: Tensor, places: Tensor, numbers: Tensor) -> None:
    words.scatter_(0, places.clamp(0, len(words) - 1), numbers.long())


def _place(symbol: Tensor, below: Tensor) -> Tensor:
    """Return the place of a symbol's frequency in the table, which does not contain that of q = 0."""
    return symbol - (symbol > below).long()


def _frequencies(symbol: Tensor, chosen: CodePlan) -> Tensor:
    """Return the frequency of each symbol, int64 [contexts, SYMBOLS]."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    q = symbol - below
    positive, negative = chosen.frequencies.unbind(1)
    each = torch.cat([negative.flip(1), torch.zeros_like(above), positive], dim=1)
    found = torch.where(q <= above, each.gather(1, (q + LEVELS[-1]).clamp(0, each.shape[1] - 1)), 0)
    found = torch.where(q == above + 1, chosen.beyond.unsqueeze(1), found)
    return torch.where(q == 0, TOTAL - found.sum(1, keepdim=True), found)


def _symbol_of(chosen: CodePlan) -> Tensor:
    """Return the symbol of each key, of positive and of negative values, int64 [contexts * 2 * KEYS]; each
    context adds SYMBOLS to those of the one before."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    keys = torch.arange(KEYS, dtype=torch.int64, device=above.device)
    q = torch.searchsorted(chosen.first, keys, right=True)
    positive = torch.where(q <= above, below + q, above + below + 1)
    negative = torch.where(q <= below, below - q, above + below + 1)
    context = torch.arange(len(above), dtype=torch.int64, device=above.device).unsqueeze(1)
    return (torch.cat([positive, negative], dim=1) + SYMBOLS * context).flatten()


def _middle(key: Tensor, negative: Tensor) -> Tensor:
    """Return the middle of keys, fp32, in units of the exponent."""
    bits = (key + LOWEST * PER_OCTAVE << _KEY_SHIFT) + (1 << _KEY_SHIFT - 1)
    middle = bits.int().view(torch.float32).clamp(max=HIGHEST)
    return torch.where(negative > 0, -middle, middle)


def _values(q: Tensor, step: Tensor, shift: Tensor) -> Tensor:
    """Return the value of each q, fp32 [contexts, SYMBOLS], in units of the exponent."""
    distance = ((q.abs() << SHIFT_BITS) - shift.unsqueeze(1)).clamp(min=0)
    size = (distance.float() * 2.0**-SHIFT_BITS * at(tables(q.device).step, step)).clamp(max=HIGHEST)
    return size * q.sign()


Encode = Callable[[Tensor, Frame], Tensor]
Decode = Callable[[Tensor, Frame, torch.dtype], tuple[Tensor, Tensor]]


def encode_sorted(x: Tensor, frame: Frame, units: SortedBlocks) -> Tensor:
    """Return the words, int16 [frame.words + units.words], of `x`, [frame.numel] of any float dtype."""
    return encode_sorted_with(encode_entropy, x, frame, units)


def decode_sorted(
    words: Tensor, frame: Frame, units: SortedBlocks, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `decode_entropy`; any classes are a possible order of the units."""
    return decode_sorted_with(decode_entropy, words, frame, units, dtype)


def encode_sorted_with(encode: Encode, x: Tensor, frame: Frame, units: SortedBlocks) -> Tensor:
    """Do it with the coder of a backend."""
    whole, rest = x.split([units.count * units.size, frame.numel - units.count * units.size])
    values = whole.view(units.size, units.count).T if units.columns else whole.view(units.count, units.size)
    largest = values.abs().amax(1).float()  # exact, in whatever order they are compared
    largest = torch.where(largest.isnan(), torch.inf, largest)
    rank = (largest.view(torch.int32) >> 16).short().argsort(descending=True, stable=True)
    number = torch.arange(units.count, dtype=torch.int64, device=x.device)
    classes = torch.empty_like(rank).scatter_(0, rank, number * CLASSES // units.count)
    code = encode(torch.cat([values[_order(classes)].reshape(-1), rest]), frame)
    return torch.cat([code, _packed(classes)])


def decode_sorted_with(
    decode: Decode, words: Tensor, frame: Frame, units: SortedBlocks, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Do it with the coder of a backend."""
    values, valid = decode(words[: frame.words], frame, dtype)
    order = _order(_unpacked(words[frame.words :], units.count))
    whole, rest = values.split([units.count * units.size, frame.numel - units.count * units.size])
    placed = torch.empty_like(whole.view(units.count, units.size))
    placed.index_copy_(0, order, whole.view(units.count, units.size))
    if units.columns:
        placed = placed.T
    return torch.cat([placed.reshape(-1), rest]), valid


def _order(classes: Tensor) -> Tensor:
    """Return the order of the units, int64 [units]: those of class 0 first, and so on."""
    return classes.to(torch.uint8).argsort(stable=True)


def _packed(classes: Tensor) -> Tensor:
    """Return int16 words of PER_WORD classes each."""
    filled = torch.nn.functional.pad(classes, (0, -len(classes) % PER_WORD)).view(-1, PER_WORD)
    return (filled << _shifts(classes.device)).sum(1).to(torch.int16)


def _unpacked(words: Tensor, units: int) -> Tensor:
    """Return the classes, int32 [units]."""
    return (words.int().unsqueeze(1) >> _shifts(words.device) & CLASSES - 1).view(-1)[:units]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 16, CLASS_BITS, dtype=torch.int32, device=device)


def search(histogram: Tensor, frame: Frame, sure: bool) -> CodePlan:
    """Return the plan with the finest step that a binary search finds to fit.

    Args:
        histogram: int64 [contexts, 2, KEYS], of the keys of positive and of negative values.
        sure: it fits for any order of the values; otherwise a code may be some words longer than planned.
    """
    made = tables(histogram.device)
    counts = _from(histogram)
    low = torch.zeros((), dtype=torch.int64, device=histogram.device)  # fits: it makes all values 0
    high = torch.full_like(low, STEPS)
    for _ in range(STEPS.bit_length()):
        middle = (low + high) // 2
        fits = plan(counts, middle, made, sure).words <= frame.capacity
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return plan(counts, low, made, sure)


def plan(counts: Tensor, step: Tensor, made: Tables, sure: bool) -> CodePlan:
    """Return how a message is coded with `step`.

    Args:
        counts: int64 [contexts, 2, KEYS + 1], how many values have a key or a higher one.
    """
    n = counts[:, :, 0].sum(1)
    first = (at(made.first, step % FINER) - PER_OCTAVE * (step // FINER)).long().clamp(1, KEYS)
    from_q = counts[:, :, first]  # [contexts, 2, 128]: how many are q = 1 .. 128 or more
    # twice the reach is worth its table where it holds more values than the table has words
    few = from_q[:, :, made.levels] <= 2 * (made.levels + 1)
    level = (~few).long().cumprod(2).sum(2).clamp(max=len(made.levels) - 1)
    reach = made.levels[level]
    inside = torch.arange(127, dtype=torch.int64, device=first.device) < reach.unsqueeze(2)
    each = (from_q[:, :, :-1] - from_q[:, :, 1:]) * inside
    escapes = from_q.gather(2, reach.unsqueeze(2)).sum((1, 2))
    share = TOTAL - 1 - (each > 0).sum((1, 2)) - (escapes > 0).long()
    frequencies = _frequency(each, share.view(-1, 1, 1), n.view(-1, 1, 1))
    beyond = _frequency(escapes, share, n)
    rest = TOTAL - frequencies.sum((1, 2)) - beyond
    cost = made.cost.long()
    if sure:
        cost = cost + SURE * (cost > 0)
    zeros = n - from_q[:, :, 0].sum(1)
    total = (each * cost[frequencies]).sum() + (escapes * cost[beyond] + zeros * cost[rest]).sum()
    words = reach.sum() + len(reach) + escapes.sum() + (total >> COST_BITS + 4)
    return CodePlan(step, reach, first, frequencies, beyond, escapes, words)


def shift_of(histogram: Tensor, chosen: CodePlan) -> Tensor:
    """Return how far magnitudes lie below their q on average, int64 [contexts], in units of 2^-SHIFT_BITS
    steps."""
    made = tables(histogram.device)
    counts, sums = _from(histogram), _from(histogram * made.weight)
    step = at(made.units, chosen.step)
    beyond = chosen.first[chosen.reach].unsqueeze(2)  # [contexts, 2, 1]: the first key that is
    first = chosen.first[0]
    from_q, escapes = counts[:, :, chosen.first], counts.gather(2, beyond)
    inside = torch.arange(127, dtype=torch.int64, device=first.device) < chosen.reach.unsqueeze(2)
    # as many times as q has steps: the sum over q of how many are q or more, and not beyond
    steps = ((from_q[:, :, :-1] - escapes) * inside).sum((1, 2))
    weights = (sums[:, :, first] - sums.gather(2, beyond).squeeze(2)).sum(1)
    count = (from_q[:, :, 0] - escapes.squeeze(2)).sum(1)
    unit = (count * step >> SHIFT_BITS).clamp(min=1)
    return torch.div(steps * step - weights, unit, rounding_mode="floor").clamp(*SHIFTS)


def at(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index] of a 0-dim index; indexing would make the host wait."""
    return table.index_select(0, index.view(1)).squeeze(0)


def _from(histogram: Tensor) -> Tensor:
    """Return the sums over a key and all higher ones, int64 [contexts, 2, KEYS + 1]."""
    return torch.nn.functional.pad(histogram.flip(2).cumsum(2).flip(2), (0, 1))


def _frequency(counts: Tensor, share: Tensor, n: Tensor) -> Tensor:
    """Return frequencies in proportion to `counts`, at least 1 if a symbol occurs; their sum is below
    TOTAL."""
    return torch.where(counts > 0, ((counts * share + n // 2) // n).clamp(min=1), 0)
