"""Counters and measurements of a pipeline, gathered on its first stage, written where DeepSpeed's monitor
writes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.config import DIRECTIONS, Config
from ds_compress.feedback.state import residuals
from ds_compress.message.channel import Channel
from ds_compress.message.clock import clock_for
from ds_compress.message.endpoint import Endpoint
from ds_compress.message.meters import OFF, ReceivingMeter, SendingMeter
from ds_compress.monitor.metrics import CHANNEL, Channels, label, stage_ms, transfer_ms, uncompressed_step_ms
from ds_compress.monitor.sinks import record_settings
from ds_compress.version import __version__

COUNTERS = ("messages", "raw_bytes", "wire_bytes", "message_raw_bytes", "message_wire_bytes")
COLUMNS = (*COUNTERS, *SendingMeter.COLUMNS, "residual_norm", *ReceivingMeter.COLUMNS)
SIDES = 2  # of a channel: where it sends, where it receives

Events = list[tuple[str, float, int]]


class Monitor:
    """Says once what is active, writes every so many steps, and sums up at the end.

    Only a step that will be written is measured; all stages know beforehand which one that is.
    """

    def __init__(
        self,
        config: Config,
        boundaries: int,
        ranks: int,
        micro_batches: int,
        device: torch.device,
        link: str,
        total: Callable[[Tensor], object],
        write: Callable[[Events], None] | None,
        reports: bool,
    ):
        """
        Args:
            boundaries: how many the pipeline has.
            ranks: how many ranks the pipeline has, each with one stage or more.
            micro_batches: messages of a channel in a training step.
            link: what the start-up line calls it.
            total: sums a tensor in place over the stages of this pipeline.
            write: DeepSpeed's `monitor.write_events`, None when no sink is on.
            reports: True on the one rank that speaks for all, a first stage.
        """
        self.config = config
        self.boundaries = boundaries
        self.ranks = ranks
        self.micro_batches = micro_batches
        self.device = device
        self._link = link
        self._total = total
        self._write = write
        self._reports = reports
        self._announced = False
        self._meters: list[tuple[Endpoint, SendingMeter | ReceivingMeter]] = []
        self._clock = clock_for(device)
        self._began: Any = None  # mark of the measured step
        self._gathered: Channels | None = None
        self._written: Channels | None = None
        self._measured = 0  # steps
        self._steps = 0
        self._started = self._ended = 0.0  # of training, seconds
        self._waited: list[float] = []  # share of a written step

    def begin_step(self, ends: Sequence[Endpoint], step: int) -> None:
        """Before the training step with number `step`, counted from 1."""
        self._started = self._started or time.perf_counter()
        if self._write is not None and self._due(step):
            compared = self._measured % self.micro_batches
            for end in ends:
                sends = end.sends
                end.meter = SendingMeter(self._clock, compared) if sends else ReceivingMeter(self._clock)
                self._meters.append((end, end.meter))
            self._measured += 1
            self._began = self._clock.mark()

    def end_step(self, ends: Sequence[Endpoint], step: int, samples: int) -> None:
        """After a training step, on all stages alike; `samples` (global) is the x-axis of DeepSpeed's own
        events."""
        measured = bool(self._meters)
        if self._announced and not measured and not self._due(step):
            return
        step_ms = self._clock.ms(self._began, self._clock.mark()) if measured else 0.0
        channels, stamps = self._gather(ends)
        first, self._announced = not self._announced, True
        if not self._reports:
            return
        if first:
            record_settings(self.config.settings)
            print(self._announcement(channels), flush=True)
        self._gathered, self._steps, self._ended = channels, step, time.perf_counter()
        if measured:
            self._complete(channels, stamps, step_ms)
            self._write(self._events(channels, step_ms, samples))

    def summary(self) -> str:
        """One line on the whole training as far as it was gathered; empty when it never was, or never
        again."""
        if self._gathered is None or not self.config.block.monitor.every:
            return ""
        raw, wire = (
            sum(c[key] for b in self._gathered for c in b.values()) for key in ("raw_bytes", "wire_bytes")
        )
        line = (
            f"ds_compress: {_bytes(wire)} sent instead of {_bytes(raw)}, {_bytes(raw - wire)} saved "
            f"({raw / wire:.2f}x) by step {self._steps}"
        )
        if self._waited:
            share = sum(self._waited) / len(self._waited)
            seconds = share * (self._ended - self._started)
            line += f"; a stage waited {share:.0%} of a step for messages, about {seconds:,.1f} s"
        return line

    def close(self) -> None:
        """At the end of training, on any rank at any time: no other rank is needed."""
        line = self.summary()
        if line:
            print(line, flush=True)

    def _due(self, step: int) -> bool:
        every = self.config.block.monitor.every
        return every > 0 and step % every == 0

    def _gather(self, ends: Sequence[Endpoint]) -> tuple[Channels, Tensor]:
        """Every channel's columns, and when its packets left and came: [boundary, direction, side,
        micro-batch].

        Each stage fills what it knows of the channels it has an end of.
        """
        columns = torch.zeros(
            self.boundaries, len(DIRECTIONS), len(COLUMNS), dtype=torch.float64, device="cpu"
        )
        times = (self.boundaries, len(DIRECTIONS), SIDES, self.micro_batches)
        stamps = torch.zeros(times, dtype=torch.float64, device="cpu")

        def place(channel: Channel) -> tuple[int, int]:
            return channel.boundary.number, DIRECTIONS.index(channel.direction)

        def fill(channel: Channel, values: dict[str, float]) -> None:
            for name, value in values.items():
                columns[place(channel)][COLUMNS.index(name)] = value

        for channel in (end.channel for end in ends if end.sends):
            fill(channel, self._counters(channel))
        for end, meter in self._meters:
            end.meter = OFF
            fill(end.channel, meter.values())
            if end.sends:
                fill(end.channel, {"residual_norm": _residual_norm(end.channel)})
            taken = torch.tensor(meter.stamps(self._began), dtype=torch.float64, device="cpu")
            stamps[place(end.channel)][int(not end.sends)] = taken
        self._meters.clear()
        both = torch.cat([columns.flatten(), stamps.flatten()]).to(self.device)
        self._total(both)
        columns, stamps = (
            t.view_as(like)
            for t, like in zip(both.cpu().split([columns.numel(), stamps.numel()]), (columns, stamps))
        )
        return [
            {name: dict(zip(COLUMNS, row)) for name, row in zip(DIRECTIONS, b)} for b in columns.tolist()
        ], stamps

    def _complete(self, channels: Channels, stamps: Tensor, step_ms: float) -> None:
        """Add what only both ends of a channel together tell."""
        for number, directions in enumerate(channels):
            sent, arrived = (
                {d: t.tolist() for d, t in zip(DIRECTIONS, side)} for side in stamps[number].unbind(1)
            )
            wire = {}
            for direction, values in directions.items():
                before = self._written[number][direction] if self._written else dict.fromkeys(COUNTERS, 0)
                messages, raw, wire[direction] = (values[key] - before[key] for key in COUNTERS[:3])
                values["ratio"] = raw / wire[direction]
                wire[direction] /= messages
            for direction, ms in transfer_ms(sent, arrived, wire).items():
                values = directions[direction]
                values["transfer_ms"] = ms * self.micro_batches
                values["link_busy"] = values["transfer_ms"] / step_ms
        self._written = channels

    @staticmethod
    def _counters(channel: Channel) -> dict[str, float]:
        sent, last = channel.sent, channel.last
        sizes = (last.raw_bytes, channel.compressed_bytes(last))
        return dict(zip(COUNTERS, (sent.messages, sent.raw_bytes, sent.wire_bytes, *sizes)))

    def _announcement(self, channels: Channels) -> str:
        boundaries = []
        for number, directions in enumerate(channels):
            codecs = self.config.codecs(number)
            parts = []
            for name, values in directions.items():
                raw, wire = values["message_raw_bytes"], values["message_wire_bytes"]
                parts.append(
                    f"{name} {getattr(codecs, name)} {raw:,.0f} -> {wire:,.0f} bytes ({raw / wire:.2f}x)"
                )
            boundaries.append(f"boundary {number}: {', '.join(parts)}")
        warmup = f", after {self.config.warmup_steps} warm-up steps" if self.config.warmup_steps else ""
        active = f"ds_compress {__version__} active, link {self._link}{warmup}"
        return f"{active}; per message: {'; '.join(boundaries)}"

    def _events(self, channels: Channels, step_ms: float, samples: int) -> Events:
        """All values of a measured step."""
        events = [
            (label(name, number, direction), values[name], samples)
            for number, directions in enumerate(channels)
            for direction, values in directions.items()
            for name in CHANNEL
        ]
        stages = [stage_ms(channels, stage) for stage in range(self.boundaries + 1)]
        self._waited.append(sum(spent["wait"] + spent["send"] for spent in stages) / self.ranks / step_ms)
        events.append((label("step_ms"), step_ms, samples))
        events.append(
            (label("uncompressed_step_ms"), uncompressed_step_ms(step_ms, channels, self.ranks), samples)
        )
        return events


def _residual_norm(channel: Channel) -> float:
    """Norm of all that error feedback holds back at the sender of `channel`, 0 without feedback."""
    held = [
        torch.linalg.vector_norm(residual.float())
        for memory in channel.boundary.memory.values()
        for residual in residuals(memory, channel.direction)
    ]
    return torch.linalg.vector_norm(torch.stack(held)).item() if held else 0.0


def _bytes(count: float) -> str:
    """`count` with a decimal prefix, as network rates have it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1e3:,.1f} kB"
