"""Encoding and decoding by `kernels.entropy`, in torch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import (
    HEAD,
    HIGHEST,
    KEYS,
    LEVELS,
    LOWEST,
    NOT_FINITE,
    PER_OCTAVE,
    REACHES,
    SHIFT_BITS,
    SHIFTS,
    START,
    STEPS,
    SYMBOLS,
    TOTAL,
    Frame,
    tables,
)
from ds_compress.kernels.entropy.rans import Coded, rans_decode, rans_encode
from ds_compress.kernels.entropy.rate import Plan, at, search, shift_of

_MAGNITUDE = 0x7FFFFFFF
_KEY_SHIFT = 15  # the digits of a float that its key leaves out


class Coder(NamedTuple):
    """Functions that the others are made of, as a backend has them."""

    encode: Callable[[Tensor, Tensor, Frame], Coded]
    decode: Callable[[Tensor, Tensor, Tensor, Tensor, Frame], tuple[Tensor, Tensor, Tensor]]


_CODER = Coder(rans_encode, rans_decode)


def encode_entropy(x: Tensor, frame: Frame) -> Tensor:
    """The words, int16 [frame.words], of `x`, [frame.numel] of any float dtype."""
    return encode_entropy_by(_CODER, x, frame)


def decode_entropy(words: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values, [frame.numel] of `dtype`, of `words`; and whether `words` can have been encoded, a bool: if
    not, all values are nan."""
    return decode_entropy_by(_CODER, words, frame, dtype)


def encode_entropy_by(coder: Coder, x: Tensor, frame: Frame) -> Tensor:
    """By the functions of a backend."""
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


def decode_entropy_by(coder: Coder, words: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By the functions of a backend."""
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
    """int64 [numel]: the keys of the floats of these bits; those of negative ones come KEYS later."""
    scale = ((255 - exponent) << 23).view(torch.float32)  # to [2, 4): neither it nor a result is subnormal
    scaled = ((bits & _MAGNITUDE).view(torch.float32) * scale).view(torch.int32)
    keys = ((scaled >> _KEY_SHIFT) - (LOWEST + 1) * PER_OCTAVE).clamp_(0, KEYS - 1)
    return keys.long() + KEYS * (bits < 0)


def _words(
    coder: Coder, keys: Tensor, exponent: Tensor, histogram: Tensor, frame: Frame, sure: bool
) -> tuple[Tensor, Tensor]:
    """The words by the plan of `search`, and whether there is room for them."""
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
    """Where the frequency of a symbol is in the table, which leaves that of 0 out."""
    return symbol - (symbol > below).long()


def _frequencies(symbol: Tensor, chosen: Plan) -> Tensor:
    """int64 [contexts, SYMBOLS]: of each symbol, 0 where there is none."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    q = symbol - below
    positive, negative = chosen.frequencies.unbind(1)
    each = torch.cat([negative.flip(1), torch.zeros_like(above), positive], dim=1)
    found = torch.where(q <= above, each.gather(1, (q + LEVELS[-1]).clamp(0, each.shape[1] - 1)), 0)
    found = torch.where(q == above + 1, chosen.beyond.unsqueeze(1), found)
    return torch.where(q == 0, TOTAL - found.sum(1, keepdim=True), found)


def _symbol_of(chosen: Plan) -> Tensor:
    """int64 [contexts * 2 * KEYS]: the symbol of each key, of positive and of negative values; those of each
    context come SYMBOLS behind those of the one before."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    keys = torch.arange(KEYS, dtype=torch.int64, device=above.device)
    q = torch.searchsorted(chosen.first, keys, right=True)
    positive = torch.where(q <= above, below + q, above + below + 1)
    negative = torch.where(q <= below, below - q, above + below + 1)
    context = torch.arange(len(above), dtype=torch.int64, device=above.device).unsqueeze(1)
    return (torch.cat([positive, negative], dim=1) + SYMBOLS * context).flatten()


def _middle(key: Tensor, negative: Tensor) -> Tensor:
    """fp32: the middle of keys, in units of the exponent."""
    bits = (key + LOWEST * PER_OCTAVE << _KEY_SHIFT) + (1 << _KEY_SHIFT - 1)
    middle = bits.int().view(torch.float32).clamp(max=HIGHEST)
    return torch.where(negative > 0, -middle, middle)


def _values(q: Tensor, step: Tensor, shift: Tensor) -> Tensor:
    """fp32 [contexts, SYMBOLS]: what each q is decoded to, in units of the exponent."""
    distance = ((q.abs() << SHIFT_BITS) - shift.unsqueeze(1)).clamp(min=0)
    size = (distance.float() * 2.0**-SHIFT_BITS * at(tables(q.device).step, step)).clamp(max=HIGHEST)
    return size * q.sign()
