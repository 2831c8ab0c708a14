"""Profile a stage during a few training batches: its times, memory, messages and links.

The profiles of all ranks together are the input of the planner.
"""

import math
import socket
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_compress.config import DIRECTIONS
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.message.clock import clock_for
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.message.observer import observing
from ds_compress.message.part import Engine, StageView
from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import LinkSpeed, MessageCost, Workload
from ds_compress.runtime.memory_use import allocatable_bytes, in_use
from ds_compress.transport.collectives import all_gather
from ds_compress.transport.p2p import Receiver, Sender
from ds_compress.transport.probe import LinkMeasurement, probe

COLUMNS = (
    "stage",
    "host",  # hash, equal on the ranks of a host
    "forward",  # median seconds of a pass
    "backward",
    "forward lower",  # quartile of the seconds
    "forward upper",
    "step",  # seconds of a step after the last pass
    "tied",  # of these, DeepSpeed's all-reduce of tied gradients
    "activations",  # bytes held between the passes of a micro-batch; nan: unknown
    "spare",  # bytes
    *(f"{what} {direction}" for direction in DIRECTIONS for what in ("bytes", "encode", "decode")),
    "from before",  # bytes per second
    "from after",
    "latency",  # seconds one way, to the next stage
)
Row = dict[str, float]
"""Measurements of a rank by column; 0 where a column does not apply."""


class StageProfiler:
    """Measures the training batches that run inside its context manager `batch`."""

    def __init__(self, engine: Engine, stage: StageView):
        self._device: torch.device = engine.device
        self._stage_id: int = engine.stage_id
        self._pipe_buffers: dict[str, list[Any]] = engine.pipe_buffers
        self._stage = stage
        self._clock = clock_for(engine.device)
        self._passes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._codecs: dict[str, list[float]] = defaultdict(list)  # milliseconds of a message
        self._bytes: dict[str, float] = {}
        self._activations: list[float] = []
        self._in_use: float | None = None  # bytes at last; None from the first backward pass on

    @contextmanager
    def batch(self, memory: bool = True) -> Iterator[None]:
        """Measure a training batch; `memory`: whether to measure the memory of its micro-batches too."""
        pairs: list[tuple[Any, SendingMeter | ReceivingMeter]] = [
            (end, SendingMeter(self._clock, compared=()) if end.sends else ReceivingMeter(self._clock))
            for end in self._stage.ends
        ]
        before = [end.channel.sent.wire_bytes for end in self._stage.ends]
        self._in_use = in_use(self._device) if memory else None
        with observing(pairs):
            yield
        if "backward" in self._passes:
            self._passes["step"].append((self._passes["backward"][-1][1], self._clock.mark()))
        for (end, meter), wire_bytes in zip(pairs, before):
            direction, values = end.channel.direction, meter.values()
            if end.sends:
                count = max(1, values["step_messages"])
                self._bytes[f"bytes {direction}"] = (end.channel.sent.wire_bytes - wire_bytes) / count
                self._codecs[f"encode {direction}"].append(values["encode_ms"] / count)
            else:
                self._codecs[f"decode {direction}"].append(values["decode_ms"] / max(1, end.messages))

    @contextmanager
    def timed(self, name: str, buffer_id: int) -> Iterator[None]:
        """Measure a `forward` or `backward` pass of the batch, or what follows, such as `tied`."""
        if name == "backward":
            self._in_use = None
        start = self._clock.mark()
        yield
        self._passes[name].append((start, self._clock.mark()))
        if self._in_use is not None:
            before, self._in_use = self._in_use, in_use(self._device)
            # without the inputs: they may be in memory that the last batch freed
            self._activations.append(self._in_use - before + self._input_bytes(buffer_id))

    def _input_bytes(self, buffer_id: int) -> int:
        """Return the bytes of inputs and labels of the micro-batch in buffer `buffer_id`."""
        buffers = self._pipe_buffers
        given = [buffers[name][buffer_id] for name in ("inputs", "labels")]
        tensors = [each for item in given for each in (item if isinstance(item, (tuple, list)) else [item])]
        return sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))

    def row(self) -> Row:
        """Probe the links to the neighbours and return all measurements. Every rank must call it."""
        found = dict.fromkeys(COLUMNS, 0.0)
        found["stage"] = float(self._stage_id)
        booted = Path("/proc/sys/kernel/random/boot_id")  # of all processes that share the host's memory
        host = booted.read_text() if booted.exists() else socket.gethostname()
        found["host"] = float(zlib.crc32(host.encode()))
        for name, marks in self._passes.items():
            seconds = sorted(self._clock.ms(*pair) / 1e3 for pair in marks)
            found[name] = statistics.median(seconds)
            if name == "forward":
                quarter = len(seconds) // 4
                found["forward lower"], found["forward upper"] = seconds[quarter], seconds[-1 - quarter]
        # A program may have replaced the instructions that measure the passes
        found["activations"] = max(self._activations or [math.nan]) if "step" in self._passes else math.nan
        found["spare"] = allocatable_bytes(self._device)
        found |= self._bytes
        for name, each in self._codecs.items():
            found[name] = min(each) / 1e3
        for is_after, measured in probe_links(self._stage, probe):
            found["from after" if is_after else "from before"] = measured.incoming
            if is_after:
                found["latency"] = measured.latency
        return found


def probe_links(
    stage: StageView, probe: Callable[[Sender, Receiver, bool], LinkMeasurement]
) -> Iterator[tuple[bool, LinkMeasurement]]:
    """Probe the links to the neighbours, first those of even boundaries, then the others; yield of each
    whether it is the link to the next stage, and its measurement. Every rank must call it.
    """
    sending = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, SendingEnd)}
    receiving = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, ReceivingEnd)}
    for number in sorted(sending, key=lambda number: number % 2):
        is_after = stage.after is not None and number == stage.after.number
        yield is_after, probe(sending[number], receiving[number], is_after)


def gather(row: Row, device: torch.device) -> list[Row]:
    """Gather the rows of all ranks on every rank; all rows must have the same columns in the same order."""
    mine = torch.tensor(list(row.values()), dtype=torch.float64, device=device)
    return [dict(zip(row, each.tolist())) for each in all_gather(mine)]


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
    stage_rows, hosts = by_stage(rows), Counter(row["host"] for row in rows)
    stages = len(stage_rows)

    def worst(stage: int, column: str) -> float:
        return max(row[column] for row in stage_rows[stage])

    def traffic(direction: str, sends: int, receives: int) -> MessageCost:
        nbytes, encode = worst(sends, f"bytes {direction}"), worst(sends, f"encode {direction}")
        return MessageCost(int(nbytes), encode, worst(receives, f"decode {direction}"))

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
            limit = budget.required(depth, micro_batches, stages, stage)
            limit += min(row["spare"] for row in stage_rows[stage])
        budgets.append(MemoryBudget(activations, packets, limit))
    passes = [tuple(worst(stage, direction) for stage in range(stages)) for direction in DIRECTIONS]
    per_step = min(worst(stage, "step") for stage in range(stages))
    workload = Workload(passes[0], passes[1], micro_batches, per_step)
    known = not any(math.isnan(row["activations"]) for row in rows)
    return ClusterProfile(workload, networks, forward, backward, tuple(budgets) if known else None)


def by_stage(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of the replicas of each stage."""
    stages = int(max(row["stage"] for row in rows)) + 1
    return [[row for row in rows if row["stage"] == stage] for stage in range(stages)]


def describe_links(rows: Sequence[Row]) -> str:
    """Return the bandwidth of the slowest link and the latency of the farthest, which may be another one."""
    slowest = min(row[side] for row in rows for side in ("from before", "from after") if row[side])
    latency = 1e3 * max(row["latency"] for row in rows)
    return f"slowest link {8e-6 * slowest:,.3g} Mbit/s, farthest {latency:.3g} ms one way"
