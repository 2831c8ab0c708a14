"""What recipe "auto" chooses for a task behind a link so slow that bytes alone decide: the fewest that the
error budget allows, which is the worst that it may do to a loss.

As in a run, the first steps train uncompressed, and candidates are evaluated on messages of the last of them.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from ds_compress.config import DIRECTIONS
from ds_compress.config.recipes import LIMITS, recipe
from ds_compress.message.clock import clock_for
from ds_compress.message.observer import observing
from ds_compress.planning.candidate_errors import Messages, evaluate
from ds_compress.planning.choice import (
    Evaluation,
    candidates_for,
    combine,
    pick_best,
    rank,
    uncompressed_recipe,
)
from ds_compress.planning.step_time import LinkSpeed, Workload
from ds_compress.runtime.auto import MessageCopies
from ds_compress.simulate import simulate
from ds_compress.simulate.boundary import SimulatedBoundary
from launch.reproduce.settings import Block
from launch.reproduce.task import STAGES, Task
from launch.reproduce.training import train

STEPS = 3
"""Uncompressed steps at the beginning of a run with "auto"."""
SLOW = LinkSpeed(bandwidth=12_500)


class Choice(NamedTuple):
    """What was chosen, its block, and its largest errors on the messages that were measured."""

    name: str
    block: Block
    token_error: float
    gradient_error: float


def choose(block: Block, task: Task, seed: int, device: torch.device) -> Choice:
    """Return what `block`, of recipe "auto", trains with from its fourth step on."""
    limits, found = LIMITS[block["quality"]], Messages()
    stages = nn.Sequential(*task.stages(seed)).to(device)
    model = simulate(stages, {"ds_compress": {"recipe": "none"}}, range(1, STAGES), task.steps_per_epoch)
    boundaries = [layer for layer in model if isinstance(layer, SimulatedBoundary)]
    copies = MessageCopies(found)
    with observing([(end, copies) for boundary in boundaries for end in boundary.ends.values()]):
        train([model], {}, task, seed, device, most=STEPS)  # messages of a step replace those before
    evaluations = [
        [
            Evaluation(candidate, **evaluate(each.upstream, candidate, pair, clock_for(device), STEPS))
            for candidate in candidates_for(block["quality"])
        ]
        for each in boundaries
        for pair in [[found[each.upstream.number, direction] for direction in DIRECTIONS]]
    ]
    raw = [sum(x.nbytes for x in found[n, "forward"][0]) for n in range(len(boundaries))]
    networks, workload = (SLOW,) * len(boundaries), Workload((1e-3,) * STAGES, (1e-3,) * STAGES, 1)
    allowed = [each for each in combine(evaluations, networks, limits, eager=True) if each.is_within(limits)]
    best: dict[str, Any] | None = pick_best(
        rank(workload, networks, [uncompressed_recipe(raw, raw), *allowed]), limits
    )
    if best is None:
        return Choice("none", recipe("none", "ds_compress"), 0.0, 0.0)
    chosen = {**best["block"], "warmup_steps": STEPS}
    return Choice(best["recipe"], chosen, best["token_error"], best["gradient_error"])
