"""Subtractive dither by `format` in PyTorch: the specification.

Roberts, Picture coding using pseudo-random noise, IRE Trans. Inf. Theory 8 (1962); Ziv, On universal
quantization, IEEE Trans. Inf. Theory 31 (1985); Zamir and Feder, On universal quantization by randomized
uniform / lattice quantizers, IEEE Trans. Inf. Theory 38 (1992).

The encoder estimates a first step from the histogram of the keys, of all or of a sample, which does not
depend on the random draws. It then quantizes the values, and counts the words of their code. While the code
does not fit, the step is made coarser, by as many indices as the words that are lacking say, at one bit per
value and octave, and by twice as many as before. After `ATTEMPTS` all values are sent as 0, which always
fits.

Words are counted as an ideal coder would write them. rANS exceeds this count by at most a thousandth or one
word in practice: it loses at most 2^-4 of a slot at a symbol, and gains as often. If it exceeded it by more,
all values would be sent as 0.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.entropy.code_plan import (
    CodePlan,
    at,
    count,
    finest,
    keys_of,
    plan,
    summed_from,
    symbols_of,
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
    SAMPLED,
    SAMPLED_RUN,
    SAMPLING,
    START,
    CodeLayout,
    tables,
)
from ds_compress.kernels.entropy.rans import Coder
from ds_compress.kernels.entropy.words import Symbols, read_words, write_words
from ds_compress.kernels.quantize.grid import draws_in_order

ATTEMPTS = 4
"""At a step whose code fits."""

MARGIN = 1024
"""One of so many words stays free."""

_MOST = 128
"""Largest |q| that is counted by itself; larger ones are counted together."""


def encode_dithered(coder: Coder, bits: Tensor, exponent: Tensor, frame: CodeLayout, dither: int) -> Tensor:
    """Encode floats into words, int16 [frame.words].

    Args:
        bits: the floats as int32.
        exponent: of the largest magnitude; if it is NOT_FINITE, the words are undefined.
        dither: key of the random draws.
    """
    device, constants = bits.device, tables(bits.device)
    drawn = draws_in_order(frame.numel, dither, device)
    classes = _classes(frame, drawn)
    raised = (exponent + COARSER).clamp(max=NOT_FINITE - 1)
    twice = bits.view(torch.float32) * ((255 - raised) << 23).view(torch.float32)
    finest_step = DITHERED_STEPS[-1] - FINER * (exponent + COARSER - raised).long()
    first = _first_step(_histogram(keys_of(bits, raised), frame), frame, finest_step)

    step, fits = first, torch.zeros((), dtype=torch.bool, device=device)
    for attempt in range(ATTEMPTS):
        new_q = _quantize(twice, drawn, step)
        counts = _count(new_q, classes, frame)
        new_plan = plan(step, counts[:, :, 1:-1], counts[:, :, 0].sum(1), constants, worst_case=False)
        if attempt == 0:
            q, chosen = new_q, new_plan
        else:
            q = torch.where(fits, q, new_q)
            chosen = CodePlan(*(torch.where(fits, old, new) for old, new in zip(chosen, new_plan)))
        lacking = new_plan.words + new_plan.words // MARGIN + 1 - frame.capacity
        fits = fits | (lacking <= 0)
        if device.type == "cpu" and fits:  # the host of a GPU does not ask
            break
        coarser = 2 * (first - step) + 1 + lacking.clamp(min=0) * 16 * FINER // frame.numel
        step = (first - coarser).clamp(min=DITHERED_STEPS[0])

    sizes = torch.arange(_MOST + 1, dtype=torch.int64, device=device)
    symbols = symbols_of(chosen, sizes).flatten().index_select(0, _places(q, classes))
    shift = torch.zeros_like(chosen.escapes)
    words, has_room = write_words(coder, chosen, symbols, q, raised, shift, frame)
    fits = fits & has_room & (bits << 1 != 0).any()
    return torch.where(fits, words, _zeros(raised, frame))


def _zeros(raised: Tensor, frame: CodeLayout) -> Tensor:
    """Return the words of a code in which all values are 0."""
    words = torch.zeros(frame.words, dtype=torch.int16, device=raised.device)
    words[1 : 2 * frame.blocks * frame.lanes : 2] = START >> 16
    words[frame.head] = raised
    return words


def decode_dithered(
    coder: Coder, words: Tensor, frame: CodeLayout, dither: int
) -> tuple[Symbols, Tensor, Tensor]:
    """Decode `words`: return their symbols, the values as fp32 [numel] in units of the exponent, and whether
    the words are valid, so that an encoder can have written them."""
    drawn = draws_in_order(frame.numel, dither, words.device)
    read = read_words(coder, words, frame, _classes(frame, drawn))
    escapes = read.escapes.to(torch.int16).int()
    valid = read.valid & (escapes.abs() <= LARGEST_Q).all()
    valid &= (read.step == 0) | (read.step >= DITHERED_STEPS[0]) & (read.step <= DITHERED_STEPS[-1])
    valid &= (read.shift == 0).all()
    q = read.find(read.q.int(), escapes.clamp(-LARGEST_Q, LARGEST_Q))
    unit = torch.where(read.step > 0, at(tables(words.device).step, read.step) * 2.0**-16, 0.0)
    value = (((q << 16) + 32767 - drawn).float() + 0.5) * unit
    return read, value.clamp(-HIGHEST, HIGHEST), valid


def _classes(frame: CodeLayout, drawn: Tensor) -> Tensor | None:
    """Return the dither class of each value, int32 [numel]; None if all have one table."""
    return None if frame.classes == 1 else drawn >> 16 - CLASS_BITS


def _quantize(twice: Tensor, drawn: Tensor, step: Tensor) -> Tensor:
    """Quantize with dither: return q, int16 [numel]. `twice`: twice the values in units of the exponent."""
    position = twice * at(tables(twice.device).inverse, step)
    return position.round_().int().add_(drawn).bitwise_right_shift_(16).to(torch.int16)


def _histogram(keys: Tensor, frame: CodeLayout) -> Tensor:
    """Count the keys that the first step comes from, int64 [1, 2, KEYS], as of one table."""
    if not frame.is_sampled:
        return count(keys, 2 * KEYS).view(1, 2, KEYS)
    runs = torch.arange(-(-frame.numel // SAMPLED_RUN), dtype=torch.int64, device=keys.device)
    is_sampled = (runs * SAMPLING & 0xFFFFFFFF) < 2**32 // SAMPLED
    is_sampled = is_sampled.unsqueeze(1).expand(-1, SAMPLED_RUN).reshape(-1)[: frame.numel]
    counts = count(torch.where(is_sampled, keys, 2 * KEYS), 2 * KEYS + 1)
    return SAMPLED * counts[:-1].view(1, 2, KEYS)


def _places(q: Tensor, classes: Tensor | None) -> Tensor:
    """Return the place of each q among those of all classes and signs, int32 [numel]."""
    places = q.int().abs_().clamp_(max=_MOST).add_(q < 0, alpha=_MOST + 1)
    return places if classes is None else places.add_(classes, alpha=2 * (_MOST + 1))


def _count(q: Tensor, classes: Tensor | None, frame: CodeLayout) -> Tensor:
    """Count how many values of each class and sign have |q| >= 0, 1, ... 129: int64 [classes, 2, 130]."""
    counts = count(_places(q, classes), frame.classes * 2 * (_MOST + 1))
    return summed_from(counts.view(frame.classes, 2, _MOST + 1))


def _first_step(histogram: Tensor, frame: CodeLayout, finest_step: Tensor) -> Tensor:
    """Return the finest step up to `finest_step` whose code is expected to fit, with some words to spare.

    Args:
        histogram: see `search`.
    """
    constants = tables(histogram.device, frame.unit_shift)
    counts, sums = summed_from(histogram), summed_from(histogram * constants.weight)
    quarters = torch.arange(CLASSES * _MOST + 1, dtype=torch.int64, device=histogram.device)
    n = (counts[:, :, 0].sum(1) // frame.classes).expand(frame.classes)

    def expected(steps: Tensor) -> CodePlan:
        octaves = (steps // FINER)[:, None]
        keys = (at(constants.quarter, steps % FINER) - PER_OCTAVE * octaves).long().clamp(1, KEYS)
        keys[:, 0].fill_(0)
        unit = at(constants.units, steps)[:, None]
        above, weight = counts[:, :, keys], sums[:, :, keys]  # [1, 2, steps, 513]
        inside = above[..., :-1] - above[..., 1:]
        distance = weight[..., :-1] - weight[..., 1:] - inside * (quarters[:-1] * unit // CLASSES)
        # of the values between two quarters of a step, those whose draw takes them to the next q
        share = torch.div(distance, (unit // CLASSES), rounding_mode="floor").clamp(min=0).minimum(inside)
        each = (above[..., 1:] + share).view(2, -1, _MOST, CLASSES)  # by the quarter that a class ends at
        both = torch.stack([each[0].flip(-1), each[1]], dim=1)
        from_q = both.permute(0, 3, 1, 2)  # [steps, classes, 2, 128]
        if frame.classes == 1:
            from_q = from_q.sum(1, keepdim=True)
        return plan(steps, from_q // CLASSES, n, constants, worst_case=False)

    last = finest_step.view(1)
    return finest(expected, DITHERED_STEPS, last, frame.capacity - spare_words(frame)).squeeze(0)


def spare_words(frame: CodeLayout) -> int:
    """Return the words to keep free: chance can make a code longer than expected."""
    return math.isqrt(frame.numel) // (3 if frame.is_sampled else 8)
