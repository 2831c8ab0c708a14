"""Which step fits: from the histogram of a message's keys to step and table, without a look at the data.

The cost of a symbol is that of an ideal coder. A lane's state x, at least 2^16 = 16 * 4096 / 4096, grows by a
symbol of frequency f to less than (4096 x / f) * (1 + f / x), and x / f is at least 16 then: so log2 of it
by the cost and at most log2(17 / 16), SURE, and each word written takes 16 off. It starts at 16 and never
ends below, so a lane writes no more words than a sixteenth of what its symbols cost, SURE included. That is
the proof that a plan which is `sure` fits; in practice the states' own 16 bits more than pay for it.

Everything is a tensor, so that the host of a GPU does not wait.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import (
    COST_BITS,
    FINER,
    KEYS,
    PER_OCTAVE,
    SHIFT_BITS,
    SHIFTS,
    STEPS,
    SURE,
    TOTAL,
    Frame,
    Tables,
    tables,
)


class Plan(NamedTuple):
    """How a message is coded."""

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


def search(histogram: Tensor, frame: Frame, sure: bool) -> Plan:
    """The finest step that a search by halves finds to fit.

    Args:
        histogram: int64 [contexts, 2, KEYS], of the keys of positive and of negative values.
        sure: in whatever order the values are; else a code may come out some words longer than planned.
    """
    made = tables(histogram.device)
    counts = _from(histogram)
    low = torch.zeros((), dtype=torch.int64, device=histogram.device)  # fits: it makes all values 0
    high = torch.full_like(low, STEPS)
    for _ in range(STEPS.bit_length()):
        middle = (low + high) // 2
        fits = plan(counts, middle, made, sure).words <= frame.room
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return plan(counts, low, made, sure)


def plan(counts: Tensor, step: Tensor, made: Tables, sure: bool) -> Plan:
    """What becomes of a message with `step`.

    counts: int64 [contexts, 2, KEYS + 1], how many keys are that or higher.
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
    return Plan(step, reach, first, frequencies, beyond, escapes, words)


def shift_of(histogram: Tensor, chosen: Plan) -> Tensor:
    """int64 [contexts]: the mean of what magnitudes lie below their q, in units of 2^-SHIFT_BITS steps."""
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
    """table[index] of a 0-dim index, for which the host would wait."""
    return table.index_select(0, index.view(1)).squeeze(0)


def _from(histogram: Tensor) -> Tensor:
    """int64 [contexts, 2, KEYS + 1]: the sum over a key and all higher ones."""
    return torch.nn.functional.pad(histogram.flip(2).cumsum(2).flip(2), (0, 1))


def _frequency(counts: Tensor, share: Tensor, n: Tensor) -> Tensor:
    """Of `share`, in proportion; at least 1 for what occurs. Their sum stays below TOTAL."""
    return torch.where(counts > 0, ((counts * share + n // 2) // n).clamp(min=1), 0)
