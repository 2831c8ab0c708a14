"""What a stage takes in time and memory, noted in a few batches of training; and what its links carry."""

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
from ds_compress.runtime.memory_use import in_use, spare
from ds_compress.transport.probe import probe

COLUMNS = (
    "stage",
    "host",  # a number that ranks of one host have alike
    "forward",  # seconds of a pass
    "backward",
    "rest",  # seconds of a step after the last pass
    "held",  # bytes between the passes of a micro-batch; nan: nobody knows
    "spare",  # bytes
    *(f"{what} {direction}" for direction in DIRECTIONS for what in ("bytes", "encode", "decode")),
    "from before",  # bytes per second
    "from after",
    "latency",  # seconds one way, to the next stage
)
Row = dict[str, float]
"""Of a rank, by column; 0 where it has none."""


class Measurement:
    """Notes of one rank on the batches that it is told of."""

    def __init__(self, engine: Any, stage: StageView):
        self._device: torch.device = engine.device
        self._stage_id: int = engine.stage_id
        self._pipe_buffers: dict[str, list[Any]] = engine.pipe_buffers
        self._stage = stage
        self._clock = clock_for(engine.device)
        self._passes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._rests: list[tuple[Any, Any]] = []
        self._codecs: dict[str, list[float]] = defaultdict(list)  # milliseconds of a message
        self._bytes: dict[str, float] = {}
        self._held: list[float] = []
        # Bytes after each forward pass until the first backward pass; None from then on
        self._used: list[int | None] | None = None

    @contextmanager
    def batch(self, memory: bool = True) -> Iterator[None]:
        """Round a batch of training; `memory`: whether what a micro-batch holds is noted too."""
        ends = self._stage.ends
        own = [end for end in ends if end.meter is None]
        for end in own:
            if isinstance(end, SendingEnd):
                end.meter = SendingMeter(self._clock, compared=())
            else:
                end.meter = ReceivingMeter(self._clock)
        before = {id(end): (end.channel.sent.messages, end.channel.sent.wire_bytes) for end in ends}
        self._used = [in_use(self._device)] if memory else None
        try:
            yield
            if "backward" in self._passes:
                self._rests.append((self._passes["backward"][-1][1], self._clock.mark()))
            for end in ends:
                self._note(end, *before[id(end)])
        finally:
            for end in own:
                end.meter = None

    @contextmanager
    def timed(self, name: str, buffer_id: int) -> Iterator[None]:
        """Round a `forward` or `backward` pass of the batch."""
        if name == "backward":
            self._used = None
        start = self._clock.mark()
        yield
        self._passes[name].append((start, self._clock.mark()))
        if self._used is not None:
            used = in_use(self._device)
            if used is None or self._used[-1] is None:
                self._held.append(float("nan"))
            else:  # what came in before the pass may stand where the batch before had left as much
                self._held.append(used - self._used[-1] + self._came_in(buffer_id))
            self._used.append(used)

    def _came_in(self, buffer_id: int) -> int:
        """Bytes of what the micro-batch in a buffer was given."""
        buffers = self._pipe_buffers
        given = [buffers[name][buffer_id] for name in ("inputs", "labels")]
        tensors = [each for item in given for each in (item if isinstance(item, (tuple, list)) else [item])]
        return sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))

    def _note(self, end: SendingEnd | ReceivingEnd, messages: int, wire_bytes: int) -> None:
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
        """Everything, after a try of the links with all neighbours: on all ranks alike."""
        found = dict.fromkeys(COLUMNS, 0.0)
        found["stage"] = float(self._stage_id)
        found["host"] = float(zlib.crc32(_host().encode()))
        for name, marks in self._passes.items():
            found[name] = statistics.median(self._clock.ms(*pair) for pair in marks) / 1e3
        if self._rests:
            found["rest"] = statistics.median(self._clock.ms(*pair) for pair in self._rests) / 1e3
        # A program may have put instructions of its own in the place of those that tell of passes
        found["held"] = max(self._held) if self._held and self._rests else float("nan")
        found["spare"] = spare(self._device)
        for direction, size in self._bytes.items():
            found[f"bytes {direction}"] = size
        for name, each in self._codecs.items():
            found[name] = min(each) / 1e3
        return found | self._links()

    def _links(self) -> Row:
        """What the links carry: boundaries with even numbers are tried first, then the others."""
        stage, found = self._stage, {}
        sending = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, SendingEnd)}
        receiving = {e.channel.boundary.number: e.link for e in stage.ends if isinstance(e, ReceivingEnd)}
        for number in sorted(sending, key=lambda number: number % 2):
            is_after = stage.after is not None and number == stage.after.number
            tried = probe(sending[number], receiving[number], first=is_after)
            found["from after" if is_after else "from before"] = tried.incoming
            if is_after:
                found["latency"] = tried.latency
        return found


def _host() -> str:
    """Return a name of this host: equal for all processes that share its memory."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    return booted.read_text() if booted.exists() else socket.gethostname()


def gather(row: Row, device: torch.device) -> list[Row]:
    """The rows of all ranks, which have the same columns in the same order, on every rank."""
    mine = torch.tensor(list(row.values()), dtype=torch.float64, device=device)
    return [dict(zip(row, each.tolist())) for each in all_gather(mine)]


def all_gather(mine: torch.Tensor) -> list[torch.Tensor]:
    """Return `mine` of every rank, on every rank."""
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return everywhere


TIMED = {
    "forward_ms": schedule.ForwardPass,
    "backward_ms": schedule.BackwardPass,
    "step_ms": schedule.OptimizerStep,
}


class StageTimes:
    """Of this process, from when it is made."""

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
        """The stage, and ms of each instruction; None where no pipeline was trained."""
        if self._stage is None:
            return None
        return {
            "stage": self._stage,
            **{name: round(statistics.median(times), 3) for name, times in self._times.items()},
        }
