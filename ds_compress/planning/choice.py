"""Choose settings from measurements, for `ds-compress advise` and `"recipe": "auto"`.

The evaluated candidates of each boundary become recipes for the whole pipeline: each candidate at all
boundaries alike, and mixtures. A mixture takes, at each boundary and in each direction, the cheapest
candidate for a given price of a second of transfer in seconds of codec. How much of a transfer is hidden
behind computation is not known beforehand, so several prices are tried. The step time of each recipe is
then predicted by replaying the schedule, at the best depth.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from ds_compress.config import DIRECTIONS, KEY, recipes
from ds_compress.config.recipes import LIMITS, ErrorLimits, Quality
from ds_compress.planning.depth import MemoryBudget, choose_depth
from ds_compress.planning.step_time import LinkSpeed, LinkSpeeds, MessageCost, TransferPlan, Workload, predict

MIN_GAIN = 0.05
"""A recipe that saves less than this share of DeepSpeed's own step time is not used."""

TIE = 0.02
"""Recipes whose steps are at most this share longer than the shortest compete by error alone."""

PRICES = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 64.0)
"""Prices of a second of transfer, in seconds of codec."""

MOST_RUNS = 4
"""How many runs of boundaries, or settings, the name of a recipe lists."""

BASELINE = "DeepSpeed"

CODECS: dict[str, tuple[Quality, Any]] = {
    "quantize 8": ("safe", {"name": "quantize", "bits": 8}),
    # without the rotation outlier channels take the range of their groups (results/forward_errors.jsonl)
    "quantize 6": ("safe", {"name": "quantize", "bits": 6, "hadamard": True}),
    # unbiased, for gradients
    "quantize 3 dither": ("safe", {"name": "quantize", "bits": 3, "hadamard": True, "rounding": "dither"}),
    "entropy 2 dither": ("balanced", {"name": "entropy", "bits": 2, "rounding": "dither"}),
}
"""The strictest quality that each may be used for, and its settings."""
RECIPES: dict[str, Quality] = {
    "bf16": "safe",
    "none": "lossless",
    "quant4": "aggressive",
    "lossless": "lossless",
    "aggressive": "aggressive",
    "balanced": "balanced",
    "safe": "safe",
}
"""The strictest quality that each may be used for. Errors in the first steps are not enough to know: messages
of a young model lie in few directions, and codecs of `aggressive` were within the budget of `safe`. From
scratch they cost a mixture of experts 1.8 %, `safe` 0.3 % (300 steps, three seeds: results/long.jsonl)."""


@dataclass(frozen=True)
class Candidate:
    """Settings of both directions of one boundary."""

    name: str
    block: dict[str, Any]  # keys of the "ds_compress" block
    is_separable: bool  # whether one direction may be used without the other


def candidates_for(quality: Quality) -> list[Candidate]:
    """Return every candidate of `quality`.

    No two share a name or a block, and each can start at any step.
    """
    found = [
        (strictest, Candidate(name, {each: {"codec": codec} for each in DIRECTIONS}, is_separable=True))
        for name, (strictest, codec) in CODECS.items()
    ]
    for name, strictest in RECIPES.items():
        recipe = recipes.recipe(name, KEY)
        block = {direction: recipe[direction] for direction in DIRECTIONS}
        found.append((strictest, Candidate(name, block, block["forward"] == block["backward"])))
    order = list(LIMITS)
    return [own for strictest, own in found if order.index(strictest) <= order.index(quality)]


class EvaluatedMessage(NamedTuple):
    """Cost and error of a candidate in one direction of a boundary; an error of inf is not known."""

    bytes: float = 0.0
    encode: float = 0.0  # seconds
    decode: float = 0.0
    error: float = math.inf  # of the message as a whole, which counts nowhere
    token_error: float = math.inf  # counts forward (`codecs.message_error`)
    gradient_error: float = math.inf  # error of the accumulated gradient, which counts backward

    @property
    def cost(self) -> MessageCost:
        return MessageCost(int(self.bytes), self.encode, self.decode)


@dataclass(frozen=True)
class Evaluation:
    """A candidate, evaluated on the messages of one boundary."""

    candidate: Candidate
    forward: EvaluatedMessage
    backward: EvaluatedMessage


class LargestErrors(NamedTuple):
    """Largest errors of all boundaries."""

    token_error: float = 0.0
    """Of activations."""
    gradient_error: float = 0.0
    """Of the accumulated gradient."""
    error_forward: float = 0.0
    """Of messages as a whole, ||x - C(x)|| / ||x||."""
    error_backward: float = 0.0


@dataclass(frozen=True)
class PipelineRecipe:
    """Settings for all boundaries, before the step time is predicted."""

    name: str
    block: dict[str, Any]
    forward: tuple[MessageCost, ...]  # by boundary
    backward: tuple[MessageCost, ...]
    eager: bool
    depth: int | str = 1  # or "auto"
    errors: LargestErrors = LargestErrors()
    exchanged: int = 0  # bytes of tied weights, as in `TransferPlan`
    budgets: Sequence[MemoryBudget] = ()  # by stage; `packets` is filled in from the recipe

    def is_within(self, limits: ErrorLimits) -> bool:
        return limits.allow(self.errors.token_error, self.errors.gradient_error)


def uncompressed_recipe(forward: Sequence[int], backward: Sequence[int]) -> PipelineRecipe:
    """Return DeepSpeed without compression; `forward` and `backward`: bytes of a message by boundary."""
    forward_costs, backward_costs = tuple(map(MessageCost, forward)), tuple(map(MessageCost, backward))
    return PipelineRecipe(BASELINE, {"enabled": False}, forward_costs, backward_costs, eager=False)


def combine(
    evaluations: Sequence[Sequence[Evaluation]],
    networks: Sequence[LinkSpeed],
    limits: ErrorLimits,
    **link: Any,
) -> list[PipelineRecipe]:
    """Make recipes of evaluated candidates: each candidate at all boundaries, and mixtures within `limits`.

    Args:
        evaluations: by boundary, of the same candidates in the same order everywhere.
        networks: by boundary.
        link: `eager`, `depth` and `budgets` of every recipe.
    """
    everywhere = [tuple(own) for own in zip(*evaluations)]
    mixed = []
    for price in PRICES:
        mixture = tuple(_cheapest(own, network, price, limits) for own, network in zip(evaluations, networks))
        if None not in mixture:
            mixed.append(mixture)
    found = {tuple(own.candidate.name for own in chosen): chosen for chosen in (*everywhere, *mixed)}
    return [build_recipe(_name(names), chosen, link) for names, chosen in found.items()]


def _cheapest(
    evaluations: Sequence[Evaluation], network: LinkSpeed, price: float, limits: ErrorLimits
) -> Evaluation | None:
    """Return the cheapest evaluation of a boundary, or of two combined; None if none is within `limits`."""

    def key(message: EvaluatedMessage) -> tuple[float, float]:
        seconds = message.encode + message.decode
        return seconds + price * int(message.bytes) / network.bandwidth, message.token_error

    separable = [own for own in evaluations if own.candidate.is_separable]
    forward = [own for own in separable if own.forward.token_error <= limits.forward]
    backward = [own for own in separable if own.backward.gradient_error <= limits.backward]
    together = [own for own in evaluations if not own.candidate.is_separable]
    whole = [own for own in together if limits.allow(own.forward.token_error, own.backward.gradient_error)]
    if forward and backward:
        best_forward = min(forward, key=lambda own: key(own.forward))
        best_backward = min(backward, key=lambda own: key(own.backward))
        is_same = best_forward is best_backward
        whole.append(best_forward if is_same else _join(best_forward, best_backward))

    def total(own: Evaluation) -> tuple[float, float]:
        (seconds, error), (other_seconds, other_error) = key(own.forward), key(own.backward)
        return seconds + other_seconds, error + other_error

    return min(whole, key=total, default=None)


def _join(forward: Evaluation, backward: Evaluation) -> Evaluation:
    """Combine the forward half of one evaluation with the backward half of another."""
    block = {key: own.candidate.block[key] for key, own in zip(DIRECTIONS, (forward, backward))}
    name = f"{forward.candidate.name} / {backward.candidate.name}"
    return Evaluation(Candidate(name, block, is_separable=True), forward.forward, backward.backward)


def _name(names: Sequence[str]) -> str:
    """Return `quantize 4`, or by boundary if they differ: `0-2: quantize 4; 3: none`; of many, how many have
    each: `41 quantize 4, 22 none`."""
    if len(set(names)) == 1:
        return names[0]
    runs = [(name, list(run)) for name, run in groupby(range(len(names)), key=names.__getitem__)]
    if len(runs) > MOST_RUNS:
        counts = Counter(names).most_common(MOST_RUNS)
        others = len(names) - sum(count for _, count in counts)
        listed = [f"{count} {name}" for name, count in counts]
        return ", ".join([*listed, f"{others} others"] if others else listed)
    return "; ".join(f"{'-'.join(map(str, dict.fromkeys((run[0], run[-1]))))}: {name}" for name, run in runs)


def build_recipe(name: str, chosen: Sequence[Evaluation], link: dict[str, Any]) -> PipelineRecipe:
    """Make one evaluation per boundary a recipe; `link`: as for `combine`."""
    forward, backward = ([getattr(own, direction) for own in chosen] for direction in DIRECTIONS)
    costs = [tuple(message.cost for message in own) for own in (forward, backward)]
    errors = LargestErrors(
        token_error=max(own.token_error for own in forward),
        gradient_error=max(own.gradient_error for own in backward),
        error_forward=max(own.error for own in forward),
        error_backward=max(own.error for own in backward),
    )
    return PipelineRecipe(name, write_block(chosen), costs[0], costs[1], errors=errors, **link)


def write_block(chosen: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the keys of the "ds_compress" block for one evaluation per boundary.

    The settings that most boundaries share stand outside of "boundaries".
    """
    blocks = [own.candidate.block for own in chosen]
    general = max(blocks, key=blocks.count)
    others = {str(number): boundary_block(own) for number, own in enumerate(blocks) if own != general}
    return {**general, **({"boundaries": others} if others else {})}


def boundary_block(block: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of "boundaries" that gives one boundary the settings of `block`."""
    return {direction: {"feedback": "none", **block[direction]} for direction in DIRECTIONS}


def rank(workload: Workload, networks: LinkSpeeds, recipes: Sequence[PipelineRecipe]) -> list[dict[str, Any]]:
    """Predict every recipe; return one row each: the baseline, which must come first, then fastest first."""
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        row = _row(workload, networks, recipe)
        rows.append(row | {"speedup": rows[0]["step_s"] / row["step_s"] if rows else 1.0})
    return rows[:1] + sorted(rows[1:], key=lambda row: row["step_s"])


def _row(workload: Workload, networks: LinkSpeeds, recipe: PipelineRecipe) -> dict[str, Any]:
    plan = TransferPlan(recipe.forward, recipe.backward, recipe.eager, exchanged=recipe.exchanged)
    both = [forward.nbytes + backward.nbytes for forward, backward in zip(recipe.forward, recipe.backward)]
    ends = zip(recipe.budgets, [0, *both], [*both, 0])
    budgets = [replace(budget, packets=float(before + after)) for budget, before, after in ends]
    block, depth = recipe.block, recipe.depth
    if isinstance(depth, str):
        depth = choose_depth(workload, plan, networks, budgets).depth
        link = {key: value for key, value in block.get("link", {}).items() if key != "memory_gb"}
        block = {**block, "link": {**link, "depth": depth}}
    prediction = predict(workload, replace(plan, depth=depth), networks)
    required = (
        budget.required(depth, workload.micro_batches, workload.stages, stage)
        for stage, budget in enumerate(budgets)
    )
    return {
        "recipe": recipe.name,
        "block": block,
        "link": "eager" if recipe.eager else "blocking",
        "depth": depth,
        "step_s": prediction.step,
        "speedup_limit": prediction.step / prediction.compute,
        "limit": prediction.limit,
        "link_busy": prediction.link_busy,
        "wire_bytes": [
            sum(cost.nbytes for cost in sent) // len(sent) for sent in (recipe.forward, recipe.backward)
        ],
        **recipe.errors._asdict(),
        "memory_bytes": max(required, default=0.0),
    }


def pick_best(rows: Sequence[dict[str, Any]], limits: ErrorLimits) -> dict[str, Any] | None:
    """Return the recipe to use: the smallest error among those nearly as fast as the fastest within `limits`.

    Args:
        rows: of `rank`.

    Returns:
        None where no recipe within `limits` saves `MIN_GAIN` of a step.
    """
    allowed = [row for row in rows[1:] if is_within(row, limits) and row["speedup"] >= 1 + MIN_GAIN]
    shortest = min((row["step_s"] for row in allowed), default=0.0)
    tied = [row for row in allowed if row["step_s"] <= (1 + TIE) * shortest]
    return min(tied, key=lambda row: (largest_error(row), row["step_s"]), default=None)


def is_within(row: dict[str, Any], limits: ErrorLimits) -> bool:
    return limits.allow(row["token_error"], row["gradient_error"])


def largest_error(row: dict[str, Any]) -> float:
    """Return the larger one of the errors that have limits."""
    return max(row["token_error"], row["gradient_error"])
