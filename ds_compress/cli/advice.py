"""What recipes would make of a step, and which of them to use: the answer of `ds-compress advise`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_compress.planning.depth import Room, choose_depth
from ds_compress.planning.step_time import Network, Plan, Traffic, Workload, predict

WORTH = 0.05
"""A recipe that gains less is not called worth it."""

MAX_ERROR = 0.25
"""Relative error of a message up to which a recipe is proposed: 4 bits without rotation have 0.21."""

STOCK = "DeepSpeed"


@dataclass(frozen=True)
class Candidate:
    """A recipe, before its step is predicted."""

    name: str
    block: dict[str, Any]
    forward: Traffic
    backward: Traffic
    eager: bool
    depth: int | str = 1  # or "auto"
    errors: tuple[float, float] = (0.0, 0.0)  # of forward and backward messages
    rooms: Sequence[Room] = ()  # of all stages; their packets are those of the recipe


def rank(workload: Workload, network: Network, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """One row per candidate: DeepSpeed's own, which must be the first, and then the fastest first."""
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        row = _row(workload, network, candidate)
        rows.append(row | {"speedup": rows[0]["step_s"] / row["step_s"] if rows else 1.0})
    return rows[:1] + sorted(rows[1:], key=lambda row: row["step_s"])


def _row(workload: Workload, network: Network, candidate: Candidate) -> dict[str, Any]:
    plan = Plan(candidate.forward, candidate.backward, candidate.eager)
    sizes = [candidate.forward.nbytes, candidate.backward.nbytes]
    ends = [(stage > 0) + (stage < workload.stages - 1) for stage in range(workload.stages)]
    rooms = [replace(room, packets=float(count * sum(sizes))) for room, count in zip(candidate.rooms, ends)]
    block, depth = candidate.block, candidate.depth
    if isinstance(depth, str):
        depth = choose_depth(workload, plan, network, rooms).depth
        block = {**block, "link": {**block.get("link", {}), "depth": depth}}
    prediction = predict(workload, replace(plan, depth=depth), network)
    taken = (
        room.taken(depth, workload.micro_batches, workload.stages, stage) for stage, room in enumerate(rooms)
    )
    return {
        "recipe": candidate.name,
        "block": block,
        "link": "eager" if candidate.eager else "blocking",
        "depth": depth,
        "step_s": prediction.step,
        "speedup_limit": prediction.step / prediction.compute,
        "limit": prediction.limit,
        "link_busy": prediction.link_busy,
        "wire_bytes": sizes,
        "error_forward": candidate.errors[0],
        "error_backward": candidate.errors[1],
        "memory_bytes": max(taken, default=0.0),
    }


def best(rows: Sequence[dict[str, Any]], max_error: float) -> dict[str, Any] | None:
    """The recipe to use: of those that are nearly as fast as the fastest whose error is small enough the one
    with the smallest error; None where no recipe is worth it."""
    allowed = [row for row in rows[1:] if error(row) <= max_error and row["speedup"] >= 1 + WORTH]
    shortest = min((row["step_s"] for row in allowed), default=0.0)
    near = [row for row in allowed if row["step_s"] <= (1 + WORTH) * shortest]
    return min(near, key=lambda row: (error(row), row["step_s"]), default=None)


def error(row: dict[str, Any]) -> float:
    """The larger one of both directions."""
    return max(row["error_forward"], row["error_backward"])


def verdict(rows: Sequence[dict[str, Any]], chosen: dict[str, Any] | None, max_error: float) -> str:
    """What to use, how much faster a step gets, and what limits it then: one line."""
    stock = rows[0]
    ceiling = f"a link without any cost would make it {stock['speedup_limit']:.2f} times as fast"
    if chosen is None:
        within = [row for row in rows[1:] if error(row) <= max_error]
        if not within:
            return f"No recipe has errors up to {max_error:g} (--max-error); {ceiling}."
        top = min(within, key=lambda row: row["step_s"])
        speed = f"{top['recipe']}, the best, makes a step {top['speedup']:.2f} times as fast"
        return f"Nothing will pay: {speed}; {ceiling}."
    what = f"{chosen['recipe']} with link depth {chosen['depth']}"
    lead = f"Compression will not pay, {what} will" if error(chosen) == 0 else f"Use {what}"
    limit = {
        "compute": "computing limits it then",
        "codec": "the codec limits it then",
        "link": f"the link limits it then, busy {chosen['link_busy']:.0%}",
    }[chosen["limit"]]
    memory = f"; {chosen['memory_bytes'] / 1e6:,.0f} MB under way on a stage" if chosen["depth"] > 1 else ""
    return (
        f"{lead}: a step {chosen['speedup']:.2f} times as fast, {_time(chosen['step_s'])} instead of "
        f"{_time(stock['step_s'])}; {limit}{memory}; {ceiling}."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
