"""Combine the stage profiles of all ranks into the input of the planner."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import LinkSpeed, MessageCost, Workload
from ds_compress.runtime.stage_profile import Row


@dataclass(frozen=True)
class ClusterProfile:
    """Compute times, links, messages and memory of a pipeline."""

    workload: Workload
    networks: tuple[LinkSpeed, ...]  # by boundary
    forward: tuple[MessageCost, ...]  # by boundary, of the codecs in use
    backward: tuple[MessageCost, ...]
    memory_budgets: tuple[MemoryBudget, ...] | None  # by stage; None: memory use is unknown


def profile_cluster(
    rows: Sequence[Row], micro_batches: int, depth: int, memory_gb: float | None, device: torch.device
) -> ClusterProfile:
    """Combine the rows of all ranks, measured at `depth`; of replicas the worst counts."""
    stages = int(max(row["stage"] for row in rows)) + 1
    hosts = Counter(row["host"] for row in rows)
    stage_rows = by_stage(rows)

    def worst(stage: int, column: str) -> float:
        return max(row[column] for row in stage_rows[stage])

    def traffic(direction: str, sends: int, receives: int) -> MessageCost:
        return MessageCost(
            int(worst(sends, f"bytes {direction}")),
            worst(sends, f"encode {direction}"),
            worst(receives, f"decode {direction}"),
        )

    boundaries = range(stages - 1)
    forward = tuple(traffic("forward", b, b + 1) for b in boundaries)
    backward = tuple(traffic("backward", b + 1, b) for b in boundaries)
    incoming = [
        [row["from after"] for row in stage_rows[b]] + [row["from before"] for row in stage_rows[b + 1]]
        for b in boundaries
    ]
    networks = tuple(LinkSpeed(min(rates), worst(b, "latency")) for b, rates in zip(boundaries, incoming))
    budgets = []
    for stage in range(stages):
        activations = max(0.0, worst(stage, "activations"))
        touched = [b for b in (stage - 1, stage) if b in boundaries]
        packets = sum(forward[b].nbytes + backward[b].nbytes for b in touched)
        budget = MemoryBudget(activations, packets)
        if memory_gb is not None:
            limit = memory_gb * 1e9
        elif device.type == "cpu":
            limit = min(row["spare"] / hosts[row["host"]] for row in stage_rows[stage])
        else:
            limit = budget.required(depth, micro_batches, stages, stage) + min(
                row["spare"] for row in stage_rows[stage]
            )
        budgets.append(MemoryBudget(activations, packets, limit))
    workload = Workload(
        tuple(worst(stage, "forward") for stage in range(stages)),
        tuple(worst(stage, "backward") for stage in range(stages)),
        micro_batches,
        min(worst(stage, "step") for stage in range(stages)),
    )
    known = not any(math.isnan(row["activations"]) for row in rows)
    return ClusterProfile(workload, networks, forward, backward, tuple(budgets) if known else None)


def by_stage(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of the replicas of each stage."""
    stages = int(max(row["stage"] for row in rows)) + 1
    return [[row for row in rows if row["stage"] == stage] for stage in range(stages)]


def slowest_link(rows: Sequence[Row]) -> str:
    """Return a description of the slowest link."""
    slowest = min(row[side] for row in rows for side in ("from before", "from after") if row[side])
    latency = 1e3 * max(row["latency"] for row in rows)
    return f"slowest link {8e-6 * slowest:,.3g} Mbit/s, {latency:.3g} ms one way"
