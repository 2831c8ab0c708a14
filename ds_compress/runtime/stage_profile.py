"""Profile a stage during a few training batches: its times, memory, messages and links."""

import functools
import socket
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_compress.config import DIRECTIONS
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.message.clock import clock_for
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.runtime.interface import StageView
from ds_compress.runtime.memory_use import allocatable_bytes, in_use
from ds_compress.transport.probe import probe

COLUMNS = (
    "stage",
    "host",  # hash, equal on the ranks of a host
    "forward",  # seconds of a pass
    "backward",
    "step",  # seconds of a step after the last pass
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

    def __init__(self, engine: Any, stage: StageView):
        self._device: torch.device = engine.device
        self._stage_id: int = engine.stage_id
        self._pipe_buffers: dict[str, list[Any]] = engine.pipe_buffers
        self._stage = stage
        self._clock = clock_for(engine.device)
        self._passes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._step_marks: list[tuple[Any, Any]] = []
        self._codecs: dict[str, list[float]] = defaultdict(list)  # milliseconds of a message
        self._bytes: dict[str, float] = {}
        self._activations: list[float] = []
        # Bytes in use after each forward pass; None from the first backward pass on
        self._memory_use: list[int | None] | None = None

    @contextmanager
    def batch(self, memory: bool = True) -> Iterator[None]:
        """Measure a training batch; `memory`: whether to measure the memory of its micro-batches too."""
        ends = self._stage.ends
        own = [end for end in ends if end.meter is None]
        for end in own:
            if isinstance(end, SendingEnd):
                end.meter = SendingMeter(self._clock, compared=())
            else:
                end.meter = ReceivingMeter(self._clock)
        before = {id(end): (end.channel.sent.messages, end.channel.sent.wire_bytes) for end in ends}
        self._memory_use = [in_use(self._device)] if memory else None
        try:
            yield
            if "backward" in self._passes:
                self._step_marks.append((self._passes["backward"][-1][1], self._clock.mark()))
            for end in ends:
                self._record(end, *before[id(end)])
        finally:
            for end in own:
                end.meter = None

    @contextmanager
    def timed(self, name: str, buffer_id: int) -> Iterator[None]:
        """Measure a `forward` or `backward` pass of the batch."""
        if name == "backward":
            self._memory_use = None
        start = self._clock.mark()
        yield
        self._passes[name].append((start, self._clock.mark()))
        if self._memory_use is not None:
            used = in_use(self._device)
            if used is None or self._memory_use[-1] is None:
                self._activations.append(float("nan"))
            else:  # without the inputs: they may be in memory that the last batch freed
                self._activations.append(used - self._memory_use[-1] + self._input_bytes(buffer_id))
            self._memory_use.append(used)

    def _input_bytes(self, buffer_id: int) -> int:
        """Return the bytes of inputs and labels of the micro-batch in buffer `buffer_id`."""
        buffers = self._pipe_buffers
        given = [buffers[name][buffer_id] for name in ("inputs", "labels")]
        tensors = [each for item in given for each in (item if isinstance(item, (tuple, list)) else [item])]
        return sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))

    def _record(self, end: SendingEnd | ReceivingEnd, messages: int, wire_bytes: int) -> None:
        direction, meter = end.channel.direction, end.meter
        assert meter is not None
        values = meter.values()
        if isinstance(end, SendingEnd):
            count = end.channel.sent.messages - messages
            self._bytes[direction] = (end.channel.sent.wire_bytes - wire_bytes) / max(1, count)
            self._codecs[f"encode {direction}"].append(values["encode_ms"] / max(1, count))
        else:
            self._codecs[f"decode {direction}"].append(values["decode_ms"] / max(1, end.messages))

    def row(self) -> Row:
        """Probe the links to the neighbours and return all measurements. Every rank must call it."""
        found = dict.fromkeys(COLUMNS, 0.0)
        found["stage"] = float(self._stage_id)
        found["host"] = float(zlib.crc32(_host().encode()))
        for name, marks in self._passes.items():
            found[name] = statistics.median(self._clock.ms(*pair) for pair in marks) / 1e3
        if self._step_marks:
            found["step"] = statistics.median(self._clock.ms(*pair) for pair in self._step_marks) / 1e3
        # A program may have replaced the instructions that measure the passes
        found["activations"] = (
            max(self._activations) if self._activations and self._step_marks else float("nan")
        )
        found["spare"] = allocatable_bytes(self._device)
        for direction, size in self._bytes.items():
            found[f"bytes {direction}"] = size
        for name, each in self._codecs.items():
            found[name] = min(each) / 1e3
        return found | self._links()

    def _links(self) -> Row:
        """Probe the links to the neighbours: first those of even boundaries, then the others."""
        stage, found = self._stage, {}
        sending = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, SendingEnd)}
        receiving = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, ReceivingEnd)}
        for number in sorted(sending, key=lambda number: number % 2):
            is_after = stage.after is not None and number == stage.after.number
            measured = probe(sending[number], receiving[number], first=is_after)
            found["from after" if is_after else "from before"] = measured.incoming
            if is_after:
                found["latency"] = measured.latency
        return found


def _host() -> str:
    """Return a name of this host: equal for all processes that share its memory."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    return booted.read_text() if booted.exists() else socket.gethostname()


def gather(row: Row, device: torch.device) -> list[Row]:
    """Gather the rows of all ranks on every rank; all rows must have the same columns in the same order."""
    mine = torch.tensor(list(row.values()), dtype=torch.float64, device=device)
    return [dict(zip(row, each.tolist())) for each in all_gather(mine)]


def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
    """Gather the tensor `mine` of all ranks on every rank."""
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return everywhere


TIMED = {
    "forward_ms": schedule.ForwardPass,
    "backward_ms": schedule.BackwardPass,
    "step_ms": schedule.OptimizerStep,
}


class StageTimes:
    """Measures the time of the schedule's instructions in the pipelines that this process runs."""

    def __init__(self) -> None:
        self._stage: int | None = None
        self._times = defaultdict[str, list[float]](list)
        engine: Any = PipelineEngine
        for name, instruction in TIMED.items():
            engine._INSTRUCTION_MAP[instruction] = self._timed(name, engine._INSTRUCTION_MAP[instruction])

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # ds_compress looks at the signature
        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            get_accelerator().synchronize()
            started = time.perf_counter()
            result = function(engine, *args, **kwargs)
            get_accelerator().synchronize()
            self._times[name].append(1e3 * (time.perf_counter() - started))
            self._stage = engine.stage_id
            return result

        return run

    def medians(self) -> dict[str, float] | None:
        """Return the stage and the median ms of each instruction; None if no pipeline was trained."""
        if self._stage is None:
            return None
        return {
            "stage": self._stage,
            **{name: round(statistics.median(times), 3) for name, times in self._times.items()},
        }
