"""Choose the depth of the schedule that pays on a link and fits into memory.

A deeper schedule keeps more micro-batches in flight, with the same results. It takes memory: stage s of S
holds the activations of depth * (S - 1 - s) + 1 micro-batches, and each end of a link one packet per depth
over 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_compress.planning.step_time import LinkSpeed, LinkSpeeds, TransferPlan, Workload, step_seconds

MAX_DEPTH = 32
MIN_GAIN = 0.01
"""Least share of a step that a greater depth has to save."""


def micro_batches_in_flight(depth: int, micro_batches: int, stages: int, stage: int) -> int:
    """Return the most micro-batches whose activations a stage holds."""
    return min(depth * (stages - 1 - stage) + 1, micro_batches)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one stage, in bytes."""

    activations: float
    """Held by a micro-batch between its forward and its backward pass."""
    packets: float = 0.0
    """Held by the stage's links, for each depth over 1."""
    limit: float = float("inf")
    """For both together."""

    def required(self, depth: int, micro_batches: int, stages: int, stage: int) -> float:
        """Return the bytes that `stage` of so many takes at `depth`."""
        micro_batches = micro_batches_in_flight(depth, micro_batches, stages, stage)
        return micro_batches * self.activations + (depth - 1) * self.packets


@dataclass(frozen=True)
class DepthChoice:
    """A depth, and what is predicted for it."""

    depth: int
    step: float
    """Seconds."""
    step_at_1: float
    """Seconds of DeepSpeed's own schedule."""
    memory: tuple[float, ...]
    """Bytes of activations and packets, by stage."""
    capped: bool
    """Whether a deeper schedule would be faster, but does not fit."""


def choose_depth(
    workload: Workload, plan: TransferPlan, network: LinkSpeeds, budgets: Sequence[MemoryBudget]
) -> DepthChoice:
    """Return the smallest depth that fits and whose predicted step is within `MIN_GAIN` of the shortest.

    Args:
        plan: eager; its own depth does not matter.
        budgets: by stage. Depth 1, which DeepSpeed itself needs, is assumed to fit.
    """
    stages, micro_batches = workload.stages, workload.micro_batches
    free = step_seconds(workload, replace(plan, depth=1), LinkSpeed())
    steps: dict[int, float] = {}
    memory: dict[int, tuple[float, ...]] = {}
    # From depth micro_batches - 1 on, all stages but the last run all their forward passes first
    for depth in range(1, max(2, min(MAX_DEPTH + 1, micro_batches))):
        memory[depth] = tuple(own.required(depth, micro_batches, stages, s) for s, own in enumerate(budgets))
        steps[depth] = step_seconds(workload, replace(plan, depth=depth), network)
        # Nothing is left to hide, or the link is saturated
        is_hidden = steps[depth] <= (1 + MIN_GAIN) * free
        if is_hidden or steps[depth] >= (1 - MIN_GAIN) * steps.get(depth - 4, math.inf):
            break
    fitting = [
        depth
        for depth, required in memory.items()
        if depth == 1 or all(nbytes <= budget.limit for nbytes, budget in zip(required, budgets))
    ]
    shortest = min(steps[depth] for depth in fitting)
    best = next(depth for depth in fitting if steps[depth] <= (1 + MIN_GAIN) * shortest)
    capped = min(steps.values()) < (1 - MIN_GAIN) * shortest
    return DepthChoice(best, steps[best], steps[1], memory[best], capped)
