"""Subtractive dither by `format` in PyTorch: the specification.

Roberts, Picture coding using pseudo-random noise, IRE Trans. Inf. Theory 8 (1962); Ziv, On universal
quantization, IEEE Trans. Inf. Theory 31 (1985); Zamir and Feder, On universal quantization by randomized
uniform / lattice quantizers, IEEE Trans. Inf. Theory 38 (1992).

The encoder estimates a first step from the histogram of the keys, which does not depend on the random draws.
It then quantizes the values, and counts the words of their code. While the code does not fit, it tries steps
that are 1, 3, 7, 15, ... indices coarser than the first one, and at last step 0, whose code always fits.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.entropy.code_plan import (
    CodePlan,
    at,
    finest,
    histogram_of,
    keys_of,
    plan,
    summed_from,
)
from ds_compress.kernels.entropy.format import (
    CLASS_BITS,
    CLASSES,
    COARSER,
    DITHERED_STEPS,
    FINER,
    HIGHEST,
    KEYS,
    LARGEST_Q,
    NOT_FINITE,
    PER_OCTAVE,
    SYMBOLS,
    Frame,
    tables,
)
from ds_compress.kernels.entropy.rans import Coder, contexts_of
from ds_compress.kernels.entropy.words import Symbols, read_words, write_words
from ds_compress.kernels.quantize.grid import draws

_MOST = 128
"""Largest |q| that is counted by itself; larger ones are counted together."""


def encode_dithered(coder: Coder, bits: Tensor, exponent: Tensor, frame: Frame, dither: int) -> Tensor:
    """Encode floats into words, int16 [frame.words].

    Args:
        bits: the floats as int32.
        exponent: of the largest magnitude; if it is NOT_FINITE, the words are undefined.
        dither: key of the random draws.
    """
    device = bits.device
    drawn = draws((1, frame.numel), dither, device)[0]
    table = _tables_of_values(frame, drawn)
    n = torch.zeros(frame.contexts * frame.classes, dtype=torch.int64, device=device)
    n.index_add_(0, table, torch.ones_like(table))
    raised = (exponent + COARSER).clamp(max=NOT_FINITE - 1)
    twice = bits.view(torch.float32) * ((255 - raised) << 23).view(torch.float32)
    finest_step = DITHERED_STEPS[-1] - FINER * (exponent + COARSER - raised).long()
    first = _first_step(histogram_of(keys_of(bits, raised, frame), frame), frame, finest_step)
    first = torch.where((bits << 1 == 0).all(), 0, first)
    made = tables(device)
    less = [(1 << attempt) - 1 for attempt in range(len(DITHERED_STEPS).bit_length() + 1)]
    steps = [torch.minimum(first, (first - number).clamp(min=DITHERED_STEPS[0])) for number in less]
    steps.append(torch.zeros_like(first))

    def choose(sure: bool) -> CodePlan:
        """Return the plan with the first of the steps that fits."""
        found = []
        for step in steps:
            q = _quantize(twice, drawn, step)
            found.append(plan(step, _count(q, table, len(n)), n, made, sure))
            if device.type == "cpu" and found[-1].words <= frame.capacity:
                return found[-1]
        chosen = found.pop()
        while found:
            fits = found[-1].words <= frame.capacity
            chosen = CodePlan(*(torch.where(fits, ours, its) for ours, its in zip(found.pop(), chosen)))
        return chosen

    def write(sure: bool) -> tuple[Tensor, Tensor]:
        chosen = choose(sure)
        q = _quantize(twice, drawn, chosen.step)
        above, below = chosen.reach[table].unbind(1)
        symbols = torch.where((q > above) | (q < -below), above + 1, q) + below + SYMBOLS * table
        shift = torch.zeros_like(n)
        return write_words(coder, chosen, symbols, q & 0xFFFF, raised, shift, frame)

    words, fits = write(sure=False)
    if not (device.type == "cpu" and fits):
        words = torch.where(fits, words, write(sure=True)[0])
    return words


def decode_dithered(coder: Coder, words: Tensor, frame: Frame, dither: int) -> tuple[Symbols, Tensor, Tensor]:
    """Decode `words`: return their symbols, the values as fp32 [numel] in units of the exponent, and whether
    the words are valid, so that an encoder can have written them."""
    drawn = draws((1, frame.numel), dither, words.device)[0]
    read = read_words(coder, words, frame, _classes(frame, drawn))
    escapes = read.escapes.to(torch.int16).int()
    valid = read.valid & ((escapes.abs() <= LARGEST_Q) | ~read.escaped).all()
    valid &= (read.step == 0) | (read.step >= DITHERED_STEPS[0]) & (read.step <= DITHERED_STEPS[-1])
    valid &= (read.shift == 0).all()
    q = torch.where(read.escaped, escapes.clamp(-LARGEST_Q, LARGEST_Q), read.q.flatten()[read.numbers].int())
    unit = torch.where(read.step > 0, at(tables(words.device).step, read.step) * 2.0**-16, 0.0)
    value = (((q << 16) + 32767 - drawn).float() + 0.5) * unit
    return read, value.clamp(-HIGHEST, HIGHEST), valid


def _classes(frame: Frame, drawn: Tensor) -> Tensor | None:
    """Return the dither class of each value, int64 [numel]; None if all have one table."""
    return None if frame.classes == 1 else (drawn >> 16 - CLASS_BITS).long()


def _tables_of_values(frame: Frame, drawn: Tensor) -> Tensor:
    """Return the index of each value's frequency table, int64 [numel]."""
    context = contexts_of(frame, drawn.device).repeat_interleave(frame.lanes)[: frame.numel]
    classes = _classes(frame, drawn)
    return context if classes is None else frame.classes * context + classes


def _quantize(twice: Tensor, drawn: Tensor, step: Tensor) -> Tensor:
    """Quantize with dither: return q, int64 [numel]. `twice`: twice the values in units of the exponent."""
    position = twice * at(tables(twice.device).inverse, step)
    fixed = (position.abs() + 0.5).int()
    return (torch.where(position < 0, -fixed, fixed) + drawn >> 16).long()


def _count(q: Tensor, table: Tensor, count: int) -> Tensor:
    """Count how many values of each table reach each q: `from_q` of `plan`, int64 [count, 2, 128]."""
    place = (2 * table + (q < 0)) * (_MOST + 1) + q.abs().clamp(max=_MOST)
    counted = torch.zeros(count * 2 * (_MOST + 1), dtype=torch.int64, device=q.device)
    counted = counted.index_add_(0, place, torch.ones_like(place)).view(count, 2, _MOST + 1)
    return summed_from(counted)[:, :, 1:-1]


def _first_step(histogram: Tensor, frame: Frame, finest_step: Tensor) -> Tensor:
    """Return the finest step up to `finest_step` whose code is expected to fit, with some words to spare.

    Args:
        histogram: see `search`.
    """
    made = tables(histogram.device)
    counts, sums = summed_from(histogram), summed_from(histogram * made.weight)
    quarters = torch.arange(CLASSES * _MOST + 1, dtype=torch.int64, device=histogram.device)
    n = (counts[:, :, 0].sum(1) // frame.classes).repeat_interleave(frame.classes)

    def expected(step: Tensor) -> CodePlan:
        keys = (at(made.quarter, step % FINER) - PER_OCTAVE * (step // FINER)).long().clamp(1, KEYS)
        keys[0] = 0
        unit = at(made.units, step)
        above, weight = counts[:, :, keys], sums[:, :, keys]
        inside = above[:, :, :-1] - above[:, :, 1:]
        distance = weight[:, :, :-1] - weight[:, :, 1:] - inside * (quarters[:-1] * unit // CLASSES)
        # of the values between two quarters of a step, those whose draw takes them to the next q
        share = torch.div(distance, (unit // CLASSES), rounding_mode="floor").clamp(min=0).minimum(inside)
        each = (above[:, :, 1:] + share).view(-1, 2, _MOST, CLASSES)  # by the quarter that a class ends at
        positive, negative = each[:, 0].flip(2), each[:, 1]
        from_q = torch.stack([positive, negative], dim=1).permute(0, 3, 1, 2)  # [contexts, classes, 2, 128]
        if frame.classes == 1:
            from_q = from_q.sum(1, keepdim=True)
        return plan(step, from_q.flatten(0, 1) // CLASSES, n, made, sure=False)

    return finest(expected, DITHERED_STEPS, finest_step, frame.capacity - spare_words(frame))


def spare_words(frame: Frame) -> int:
    """Return the words to keep free: chance can make a code longer than expected."""
    return math.isqrt(frame.numel) // 8
