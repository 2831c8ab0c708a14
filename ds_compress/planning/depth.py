"""Which depth of the schedule pays on a link, and fits into memory.

More micro-batches under way change no number that is computed. They cost memory: stage s of S holds the
activations of depth * (S - 1 - s) + 1 of them, and its links a packet more at each end for each further
depth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_compress.planning.step_time import Network, Networks, Plan, Workload, step_seconds
from ds_compress.planning.under_way import under_way

MOST = 32
WORTH = 0.01
"""A depth that gains less than this share of a step is left alone."""


@dataclass(frozen=True)
class Room:
    """Memory of one stage, in bytes."""

    held: float
    """By a micro-batch between its forward and its backward pass."""
    packets: float = 0.0
    """By its links, for each depth over 1."""
    limit: float = float("inf")
    """For both together."""

    def taken(self, depth: int, micro_batches: int, stages: int, stage: int) -> float:
        """Bytes, at a depth, by `stage` of so many."""
        return under_way(depth, micro_batches, stages, stage) * self.held + (depth - 1) * self.packets


@dataclass(frozen=True)
class Choice:
    """A depth, and what is expected of it."""

    depth: int
    step: float
    """Seconds, as predicted."""
    step_at_1: float
    """The same with DeepSpeed's own schedule."""
    memory: tuple[float, ...]
    """Bytes that activations and packets take, by stage."""
    capped: bool
    """Whether a deeper schedule would be faster, and does not fit."""

    @property
    def gain(self) -> float:
        """Times as fast as at depth 1."""
        return self.step_at_1 / self.step


def choose_depth(workload: Workload, plan: Plan, network: Networks, rooms: Sequence[Room]) -> Choice:
    """The smallest depth whose step, as predicted, is within `WORTH` of the shortest of all that fit.

    Args:
        plan: eager; its depth does not matter.
        rooms: stage by stage. Depth 1 is what DeepSpeed itself takes: that it fits is taken for granted.
    """
    stages, micro_batches = workload.stages, workload.micro_batches
    free = step_seconds(workload, replace(plan, depth=1), Network())
    steps: dict[int, float] = {}
    memory: dict[int, tuple[float, ...]] = {}
    # From depth micro_batches - 1 on all forward passes of every stage but the last come first
    for depth in range(1, max(2, min(MOST + 1, micro_batches))):
        taken = tuple(room.taken(depth, micro_batches, stages, s) for s, room in enumerate(rooms))
        memory[depth] = taken
        steps[depth] = step_seconds(workload, replace(plan, depth=depth), network)
        # Nothing is left to hide, or the link is full
        if steps[depth] <= (1 + WORTH) * free or steps[depth] >= (1 - WORTH) * steps.get(depth - 4, math.inf):
            break
    fit = [
        depth
        for depth, taken in memory.items()
        if depth == 1 or all(bytes_ <= room.limit for bytes_, room in zip(taken, rooms))
    ]
    shortest = min(steps[depth] for depth in fit)
    best = next(depth for depth in fit if steps[depth] <= (1 + WORTH) * shortest)
    capped = min(steps.values()) < (1 - WORTH) * shortest
    return Choice(best, steps[best], steps[1], memory[best], capped)
