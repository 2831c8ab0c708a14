"""What all ranks have measured, as the planner takes it: compute times, links, memory, messages."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import MessageCost, Network, Workload
from ds_compress.runtime.measuring import Row


@dataclass(frozen=True)
class ClusterProfile:
    workload: Workload
    networks: tuple[Network, ...]  # by boundary
    forward: tuple[MessageCost, ...]  # by boundary, of the codecs in use
    backward: tuple[MessageCost, ...]
    memory_budgets: tuple[MemoryBudget, ...] | None  # by stage; None: what a micro-batch holds is not known


def situation(
    rows: Sequence[Row], micro_batches: int, depth: int, memory_gb: float | None, device: torch.device
) -> ClusterProfile:
    """Of a pipeline, from the rows of all its ranks, measured at `depth`; of replicas the worst counts."""
    stages = int(max(row["stage"] for row in rows)) + 1
    hosts = Counter(row["host"] for row in rows)
    of = by_stage(rows)

    def worst(stage: int, column: str) -> float:
        return max(row[column] for row in of[stage])

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
        [row["from after"] for row in of[b]] + [row["from before"] for row in of[b + 1]] for b in boundaries
    ]
    networks = tuple(Network(min(rates), worst(b, "latency")) for b, rates in zip(boundaries, incoming))
    budgets = []
    for stage in range(stages):
        held = max(0.0, worst(stage, "held"))
        touched = [b for b in (stage - 1, stage) if b in boundaries]
        packets = sum(forward[b].nbytes + backward[b].nbytes for b in touched)
        budget = MemoryBudget(held, packets)
        if memory_gb is not None:
            limit = memory_gb * 1e9
        elif device.type == "cpu":
            limit = min(row["spare"] / hosts[row["host"]] for row in of[stage])
        else:
            limit = budget.required(depth, micro_batches, stages, stage) + min(
                row["spare"] for row in of[stage]
            )
        budgets.append(MemoryBudget(held, packets, limit))
    workload = Workload(
        tuple(worst(stage, "forward") for stage in range(stages)),
        tuple(worst(stage, "backward") for stage in range(stages)),
        micro_batches,
        min(worst(stage, "rest") for stage in range(stages)),
    )
    known = not any(math.isnan(row["held"]) for row in rows)
    return ClusterProfile(workload, networks, forward, backward, tuple(budgets) if known else None)


def by_stage(rows: Sequence[Row]) -> list[list[Row]]:
    """Those of each stage: of its replicas."""
    stages = int(max(row["stage"] for row in rows)) + 1
    return [[row for row in rows if row["stage"] == stage] for stage in range(stages)]


def slowest_link(rows: Sequence[Row]) -> str:
    """In words."""
    slowest = min(row[side] for row in rows for side in ("from before", "from after") if row[side])
    latency = 1e3 * max(row["latency"] for row in rows)
    return f"slowest link {8e-6 * slowest:,.3g} Mbit/s, {latency:.3g} ms one way"
