"""How far the stages of an engine run ahead: `link.depth`, or with "auto" what measurements say.

The first batch of an engine has costs of its own. In the next ones each stage notes how long its passes and
codecs take and what a micro-batch holds in memory; after the last of them neighbours try their links with a
few packets. One collective makes all of it known to all ranks, and each works out the same depth from it. It
holds from the next batch on, and is found anew when the number of micro-batches changes, or after a
checkpoint was loaded. No depth changes a number that is computed, so what is measured does not get into
training.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_compress.config.block import Link
from ds_compress.pipeline.measuring import Measurement, Row, gather
from ds_compress.pipeline.stage import Stage
from ds_compress.planning.depth import Choice, Room, choose_depth
from ds_compress.planning.schedule import DepthSchedule, depth_in_words, is_deepspeeds
from ds_compress.planning.step_time import Network, Plan, Traffic, Workload
from ds_compress.transport.staging import receives_hold_device

MEASURED = (2, 3)
"""Batches, counted from 1."""


class Ahead:
    """The depth of one engine: of the schedules it runs, and of its links."""

    def __init__(self, link: Link):
        self.now = 1 if link.depth == "auto" else link.depth
        self._link = link
        self._batches = 0
        self._micro_batches = 0  # of the batches that were counted
        self._measurement: Measurement | None = None
        self.measuring: Measurement | None = None  # what times the passes of the batch in progress

    @property
    def auto(self) -> bool:
        return self._link.depth == "auto"

    def schedule(self, engine: Any, pipe_schedule: Any) -> Any:
        """What to run in the place of `pipe_schedule`: a deeper one, if that is DeepSpeed's own."""
        if self.now == 1 or not _is_ours(engine, pipe_schedule):
            return pipe_schedule
        place = pipe_schedule.micro_batches, pipe_schedule.stages, pipe_schedule.stage_id
        return DepthSchedule(*place, self.now)

    def in_words(self, engine: Any, pipe_schedule: Any) -> str:
        """What the start-up line adds to the name of the link, by the schedule that it runs."""
        if not self.auto:
            return depth_in_words(self.now, pipe_schedule)
        if engine.dynamic_shape:
            return f", depth auto, {self.now} because of dynamic_shape"
        if is_deepspeeds(pipe_schedule) or isinstance(pipe_schedule, DepthSchedule):
            return f", depth auto, {self.now} until it is measured"
        return ", depth auto without effect on this schedule"

    @contextmanager
    def batch(self, engine: Any, stage: Stage, pipe_schedule: Any) -> Iterator[None]:
        """Round a batch of training that DeepSpeed wants `pipe_schedule` for; on all ranks alike."""
        if not self.auto or engine.dynamic_shape or not _is_ours(engine, pipe_schedule):
            yield
            return
        if engine.micro_batches != self._micro_batches:
            self.measure_again()
            self._micro_batches = engine.micro_batches
        self._batches += 1
        if self._batches not in MEASURED:
            yield
            return
        self._measurement = self._measurement or Measurement(engine, stage)
        self.measuring = self._measurement
        try:
            with self._measurement.batch():
                yield
        finally:
            self.measuring = None
        if self._batches == MEASURED[-1]:
            row, self._measurement = self._measurement.row(), None
            self._choose(engine, stage, gather(row, engine.device))

    def measure_again(self) -> None:
        """Find the depth anew in the next batches; until then it stays as it is."""
        self._batches, self._measurement = 0, None

    def set(self, stage: Stage, depth: int) -> None:
        """Let the next batches run at `depth`; between two batches, on all ranks alike."""
        self.now = depth
        for end in stage.ends:
            end.link.keep_up_with(depth)
            end.second.keep_up_with(depth)

    def _choose(self, engine: Any, stage: Stage, rows: Sequence[Row]) -> None:
        choice = decide(rows, engine.micro_batches, self.now, self._link.memory_gb, engine.device)
        self.set(stage, choice.depth if choice else 1)
        if engine.global_rank == 0:
            print(said(choice, rows), flush=True)


def _is_ours(engine: Any, pipe_schedule: Any) -> bool:
    """Whether a deeper schedule may stand in for it."""
    # A shape message waits until the next stage asks for it, and that stage's device may wait until this one
    # asks for a gradient (tests/transport/test_posting.py)
    waits = engine.dynamic_shape and receives_hold_device(engine.device)
    return is_deepspeeds(pipe_schedule) and not waits


def decide(
    rows: Sequence[Row], micro_batches: int, depth: int, memory_gb: float | None, device: torch.device
) -> Choice | None:
    """The depth for what all ranks have measured at `depth`; None where nobody knows what it would take."""
    stages = int(max(row["stage"] for row in rows)) + 1
    hosts = Counter(row["host"] for row in rows)
    of = [[row for row in rows if row["stage"] == stage] for stage in range(stages)]  # replicas

    def worst(stage: int, column: str) -> float:
        return max(row[column] for row in of[stage])

    def traffic(direction: str, sends: int, receives: int) -> Traffic:
        return Traffic(
            int(worst(sends, f"bytes {direction}")),
            worst(sends, f"encode {direction}"),
            worst(receives, f"decode {direction}"),
        )

    if any(math.isnan(row["held"]) for row in rows):
        return None
    boundaries = range(stages - 1)
    forward = tuple(traffic("forward", b, b + 1) for b in boundaries)
    backward = tuple(traffic("backward", b + 1, b) for b in boundaries)
    incoming = [
        [row["from after"] for row in of[b]] + [row["from before"] for row in of[b + 1]] for b in boundaries
    ]
    network = tuple(Network(min(rates), worst(b, "latency")) for b, rates in zip(boundaries, incoming))
    rooms = []
    for stage in range(stages):
        held = max(0.0, worst(stage, "held"))
        touched = [b for b in (stage - 1, stage) if b in boundaries]
        packets = sum(forward[b].nbytes + backward[b].nbytes for b in touched)
        room = Room(held, packets)
        if memory_gb is not None:
            limit = memory_gb * 1e9
        elif device.type == "cpu":
            limit = min(row["spare"] / hosts[row["host"]] for row in of[stage])
        else:
            limit = room.taken(depth, micro_batches, stages, stage) + min(row["spare"] for row in of[stage])
        rooms.append(Room(held, packets, limit))
    workload = Workload(
        tuple(worst(stage, "forward") for stage in range(stages)),
        tuple(worst(stage, "backward") for stage in range(stages)),
        micro_batches,
        min(worst(stage, "rest") for stage in range(stages)),
    )
    return choose_depth(workload, Plan(forward, backward, eager=True), network, rooms)


def said(choice: Choice | None, rows: Sequence[Row]) -> str:
    """The line on what was chosen."""
    if choice is None:
        return "ds_compress: link depth 1 chosen: what a micro-batch holds in memory cannot be measured here"
    slowest = min(row[side] for row in rows for side in ("from before", "from after") if row[side])
    latency = 1e3 * max(row["latency"] for row in rows)
    memory = max(choice.memory) / 1e6
    step = f"step {choice.step_at_1:.3g} s"
    if choice.depth > 1:
        step += f" -> {choice.step:.3g} s as predicted ({choice.gain:.2f} times as fast)"
    capped = "; deeper would be faster, and needs more memory (link.memory_gb)" if choice.capped else ""
    return (
        f"ds_compress: link depth {choice.depth} chosen: {step}; slowest link {8e-6 * slowest:,.3g} Mbit/s, "
        f"{latency:.3g} ms one way; {memory:,.3g} MB for what is under way on a stage{capped}"
    )
