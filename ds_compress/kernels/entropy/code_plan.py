"""Plan the code of a message: find the finest step whose code fits, from a histogram of the values.

The cost of a symbol is that of an ideal coder. A plan for the worst case adds ROUNDING_COST to each, and then
fits for any order of the symbols. Proof: encoding a symbol of frequency f raises the state x of a lane to
less than (4096 x / f) * (1 + f / x), where x / f is at least 16. So log2 x grows by the cost and at most by
log2(17 / 16), ROUNDING_COST. Each written word lowers log2 x by 16. It starts at 16 and never ends lower, so
a lane writes at most a sixteenth as many words as its symbols cost in bits, ROUNDING_COST included. In
practice the 16 bits left in the states make up for it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import (
    COST_BITS,
    FINER,
    KEY_SHIFT,
    KEYS,
    LEVELS,
    LOWEST,
    PER_OCTAVE,
    ROUNDING_COST,
    SHIFT_BITS,
    SHIFTS,
    STEPS,
    SYMBOLS,
    TOTAL,
    CodeLayout,
    FormatTables,
    tables,
)

_MAGNITUDE = 0x7FFFFFFF

BISECTIONS = 6
"""Of the search for a step, planned together."""

SPREAD = 32
"""Places at which one number is counted, in turn: a GPU adds to one place after the other."""


class CodePlan(NamedTuple):
    """Frequencies and size of the code of a message, at one step."""

    step: Tensor
    """int64: index j of the step."""

    reach: Tensor
    """int64 [tables, 2]: largest q and largest -q that have a frequency of their own."""

    frequencies: Tensor
    """int64 [tables, 2, 127]: of q = 1 .. 127, and of -1 .. -127; 0 beyond `reach`."""

    beyond: Tensor
    """int64 [tables]: frequency of the escape symbol, for values beyond `reach`."""

    escapes: Tensor
    """int64 [tables]: number of values beyond `reach`."""

    words: Tensor
    """int64: words of tables, escapes and code; the code may be longer by ROUNDING_COST a
    symbol, unless that is planned for."""


def exponent_of(bits: Tensor) -> Tensor:
    """Return the biased exponent of the largest magnitude, int32; NOT_FINITE if a value is inf or nan.
    `bits`: the floats as int32."""
    return ((bits & _MAGNITUDE).amax() >> 23).clamp(min=1)


def keys_of(bits: Tensor, exponent: Tensor) -> Tensor:
    """Return the histogram keys of floats given by their `bits`, int32 [numel]; KEYS is added for negative
    values."""
    scale = ((255 - exponent) << 23).view(torch.float32)  # to [2, 4): neither it nor a result is subnormal
    keys = (bits & _MAGNITUDE).view(torch.float32).mul_(scale).view(torch.int32)
    keys = keys.bitwise_right_shift_(KEY_SHIFT).sub_((LOWEST + 1) * PER_OCTAVE).clamp_(0, KEYS - 1)
    return keys.add_(bits < 0, alpha=KEYS)


def count(numbers: Tensor, size: int) -> Tensor:
    """Count how often each number below `size` is in `numbers`, int32 [n]: int64 [size]."""
    places = torch.arange(len(numbers), dtype=torch.int32, device=numbers.device).remainder_(SPREAD)
    counted = torch.zeros(size * SPREAD, dtype=torch.int32, device=numbers.device)
    ones = torch.ones(1, dtype=torch.int32, device=numbers.device).expand(len(numbers))
    return counted.index_add_(0, places.add_(numbers, alpha=SPREAD), ones).view(size, SPREAD).sum(1)


def search(histogram: Tensor, frame: CodeLayout, worst_case: bool) -> CodePlan:
    """Return the plan with the finest step whose code fits, found by binary search.

    Args:
        histogram: int64 [1, 2, KEYS], counts of keys, for positive and for negative values.
        worst_case: plan a code that fits for any order of the values; else it may be some words too long.
    """
    constants = tables(histogram.device)
    counts = summed_from(histogram)
    n = counts[:, :, 0].sum(1)

    def plan_of(steps: Tensor) -> CodePlan:
        from_q = counts[:, :, first_keys(steps, constants)].permute(2, 0, 1, 3)  # [steps, 1, 2, 128]
        return plan(steps, from_q, n, constants, worst_case)

    last = torch.full((1,), STEPS - 1, dtype=torch.int64, device=histogram.device)
    chosen = plan_of(finest(plan_of, range(STEPS), last, frame.capacity))
    return CodePlan(*(part.squeeze(0) for part in chosen))


def finest(plan_of: Callable[[Tensor], CodePlan], steps: range, last: Tensor, capacity: int) -> Tensor:
    """Return the finest of `steps` up to `last` whose plan fits, int64 [1], by binary search; else the first.

    Whatever the outcomes of the next bisections will be, their steps are planned together: on a GPU an
    operation on a few numbers takes as long as its launch.

    Args:
        plan_of: plans codes for steps, int64 [n].
        last: int64 [1].
    """
    low, high = torch.full_like(last, steps[0]), last + 1
    for _ in range(-(-len(steps).bit_length() // BISECTIONS)):
        place, middles = torch.zeros_like(last), list[Tensor]()
        # after i of them [2^i] intervals: number k becomes 2k if its middle is too fine, 2k + 1 if it fits
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            middles.append(middle)
            low, high = torch.stack([low, middle], 1).flatten(), torch.stack([middle, high], 1).flatten()
        fits = (plan_of(torch.cat(middles)).words <= capacity).long()
        for own in fits.split([len(middle) for middle in middles]):
            place = 2 * place + own.index_select(0, place)
        low, high = low.index_select(0, place), high.index_select(0, place)
    return low


def first_keys(step: Tensor, constants: FormatTables) -> Tensor:
    """Return the first key of q = 1 .. 128, int64 [..., 128], of each `step`."""
    octaves = (step // FINER).unsqueeze(-1)
    return (at(constants.first, step % FINER) - PER_OCTAVE * octaves).long().clamp(1, KEYS)


def plan(step: Tensor, from_q: Tensor, n: Tensor, constants: FormatTables, worst_case: bool) -> CodePlan:
    """Return how a message is coded with `step`, or with each of several steps: `...` below.

    Args:
        step: int64 [...].
        from_q: int64 [..., tables, 2, 128], how many positive values, and how many negative ones, become
            q = 1 .. 128 or more.
        n: int64 [tables], how many values there are.
        worst_case: see `search`.
    """
    # twice the reach is worth its table where it holds more values than the table has words
    few = from_q[..., constants.levels] <= 2 * (constants.levels + 1)
    level = (~few).long().cumprod(-1).sum(-1).clamp(max=len(constants.levels) - 1)
    reach = constants.levels[level]
    inside = torch.arange(127, dtype=torch.int64, device=from_q.device) < reach.unsqueeze(-1)
    each = (from_q[..., :-1] - from_q[..., 1:]) * inside
    escapes = from_q.gather(-1, reach.unsqueeze(-1)).sum((-2, -1))
    share = TOTAL - 1 - (each > 0).sum((-2, -1)) - (escapes > 0).long()
    frequencies = _frequency(each, share[..., None, None], n[:, None, None])
    beyond = _frequency(escapes, share, n)
    rest = TOTAL - frequencies.sum((-2, -1)) - beyond
    cost = constants.cost.long()
    if worst_case:
        cost = cost + ROUNDING_COST * (cost > 0)
    zeros = n - from_q[..., 0].sum(-1)
    total = (each * cost[frequencies]).sum((-3, -2, -1))
    total = total + (escapes * cost[beyond] + zeros * cost[rest]).sum(-1)
    words = reach.sum((-2, -1)) + reach.shape[-2] + escapes.sum(-1) + (total >> COST_BITS + 4)
    return CodePlan(step, reach, frequencies, beyond, escapes, words)


def shift_of(histogram: Tensor, chosen: CodePlan, frame: CodeLayout) -> Tensor:
    """Return by how much magnitudes are smaller than their |q| steps on average, int64 [tables], in units
    of 2^-SHIFT_BITS steps."""
    constants = tables(histogram.device, frame.unit_shift)
    counts, sums = summed_from(histogram), summed_from(histogram * constants.weight)
    step, first = at(constants.units, chosen.step), first_keys(chosen.step, constants)
    beyond = first[chosen.reach].unsqueeze(2)  # [tables, 2, 1]: the first key that is
    from_q, escapes = counts[:, :, first], counts.gather(2, beyond)
    inside = torch.arange(127, dtype=torch.int64, device=first.device) < chosen.reach.unsqueeze(2)
    # as many times as q has steps: the sum over q of how many are q or more, and not beyond
    steps = ((from_q[:, :, :-1] - escapes) * inside).sum((1, 2))
    weights = (sums.index_select(2, first[:1]) - sums.gather(2, beyond)).sum((1, 2))
    count = (from_q[:, :, 0] - escapes.squeeze(2)).sum(1)
    unit = (count * step >> SHIFT_BITS).clamp(min=1)
    return torch.div(steps * step - weights, unit, rounding_mode="floor").clamp(*SHIFTS)


def at(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index]; plain indexing by a 0-dim index would make the host wait for the device."""
    return table.index_select(0, index.flatten()).view(index.shape + table.shape[1:])


def summed_from(histogram: Tensor) -> Tensor:
    """Sum the counts of each key and all higher keys, int64 [tables, 2, KEYS + 1]."""
    return torch.nn.functional.pad(histogram.flip(2).cumsum(2).flip(2), (0, 1))


def _frequency(counts: Tensor, share: Tensor, n: Tensor) -> Tensor:
    """Scale `counts` to frequencies: at least 1 for a symbol that occurs, with a sum below TOTAL."""
    n = n.clamp(min=1)  # a class may have no values
    return torch.where(counts > 0, ((counts * share + n // 2) // n).clamp(min=1), 0)


def symbols_of(chosen: CodePlan, size: Tensor) -> Tensor:
    """Return the symbols of q and of -q for each |q| in `size`, int64 [n]: int16 [tables, 2, n], those of
    table t from t * SYMBOLS on."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    first = torch.arange(len(above), dtype=torch.int64, device=size.device).unsqueeze(1) * SYMBOLS + below
    positive = torch.where(size <= above, size, above + 1)
    negative = torch.where(size <= below, -size, above + 1)
    return torch.stack([first + positive, first + negative], dim=1).to(torch.int16)


def frequencies_of(symbol: Tensor, chosen: CodePlan) -> Tensor:
    """Return the frequency of each symbol, int64 [tables, SYMBOLS]."""
    above, below = chosen.reach.unsqueeze(2).unbind(1)
    q = symbol - below
    positive, negative = chosen.frequencies.unbind(1)
    each = torch.cat([negative.flip(1), torch.zeros_like(above), positive], dim=1)
    found = torch.where(q <= above, each.gather(1, (q + LEVELS[-1]).clamp(0, each.shape[1] - 1)), 0)
    found = torch.where(q == above + 1, chosen.beyond.unsqueeze(1), found)
    return torch.where(q == 0, TOTAL - found.sum(1, keepdim=True), found)
