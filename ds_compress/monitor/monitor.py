"""Gather counters and measurements on the first stage, and write them to DeepSpeed's monitors."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_compress.config import Config
from ds_compress.errors import in_one_line
from ds_compress.message.channel import Channel
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.message.clock import clock_for
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.monitor import lines
from ds_compress.monitor.limits import MessageQuality
from ds_compress.monitor.metrics import (
    CHANNEL,
    COUNTERS,
    Channels,
    complete,
    label,
    stage_ms,
    uncompressed_step_ms,
)
from ds_compress.monitor.residual import residual_values
from ds_compress.monitor.sinks import add_tensorboard_layout, record_settings
from ds_compress.monitor.table import Status, Table

End = SendingEnd | ReceivingEnd
Events = list[tuple[str, float, int]]

logger = logging.getLogger("ds_compress")


class LineExchange(Protocol):
    """Takes lines of every rank to the one that reports."""

    def leave(self, lines: dict[str, str]) -> None: ...

    def read(self, key: str) -> str: ...


class Monitor:
    """Prints what is active, writes values every so many steps, and prints a summary at the end.

    Only a step that will be written is measured; all stages know beforehand which one that is. It never stops
    training: the first error of any stage, its own or a sink's, is one warning, and switches it off on all
    stages of the pipeline at the next sum, which all enter whatever has happened to them.
    """

    def __init__(
        self,
        config: Config,
        boundaries: int,
        ranks: int,
        rank: int,
        device: torch.device,
        link: str,
        total: Callable[[Tensor], object],
        notes: LineExchange,
        reports: bool,
    ):
        """
        Args:
            boundaries: how many the pipeline has.
            ranks: how many ranks the pipeline has, each with one stage or more.
            rank: which of them this one is.
            link: what the start-up line calls it.
            total: sums a tensor in place over the stages of this pipeline.
            notes: takes lines of every rank to the one that reports.
            reports: True on the one rank that speaks for all, a first stage.
        """
        self.config = config
        self.boundaries = boundaries
        self.ranks = ranks
        self._rank = rank
        self.link = link
        self._total = total
        self._notes = notes
        self._reports = reports
        self._announced = False
        self._meters: list[tuple[End, SendingMeter | ReceivingMeter]] = []
        self._clock = clock_for(device)
        self._table = Table(boundaries, ranks, device)
        self._due = False  # whether the step in progress is to be summed up over the stages
        self._writes = False  # and written
        self._began: Any = None  # mark of the measured step
        self._failure = ""  # of this rank, in one line
        self._said, self._off, self._sizes_unsaid = False, False, True  # sizes: of the codecs in force
        self._warned: set[tuple[int, str, str]] = set()  # of: boundary, direction, limit
        self._gathered: Channels = []
        self._last: tuple[Channels, Channels] = [], []  # measured last, and before
        self._written: Channels = []
        # steps that were measured; number of the first step of this run, and of the last summed up
        self._measured = self._first = self._steps = 0
        self._started = self._ended = 0.0  # of training, seconds
        self._waited: list[float] = []  # share of a written step

    def follow(self) -> None:
        """The config has other codecs from now on: what there is to say of them is said anew."""
        self._warned.clear()
        self._sizes_unsaid = True

    def begin_step(
        self, ends: Sequence[End], step: int, micro_batches: int, watched: bool, judged: bool = False
    ) -> None:
        """Before the training step with number `step`, counted from 1.

        `watched`: whether DeepSpeed's monitor has a sink; `judged`: whether the guard looks at this step.
        """
        self._started, self._first = self._started or time.perf_counter(), self._first or step
        every = self.config.block.monitor.every
        counted = every > 0 and step % every == 0
        summed = counted or judged or lines.is_early(step - self._first + 1, every)
        self._due = summed and not self._off
        self._writes = counted and watched
        self._take_meters()  # of a step that was interrupted
        if not self._due or not (self._writes or judged):
            return
        with self._guarded():
            compared = self._measured % micro_batches
            for end in ends:
                if isinstance(end, SendingEnd):
                    end.meter = SendingMeter(self._clock, compared)
                else:
                    end.meter = ReceivingMeter(self._clock)
                self._meters.append((end, end.meter))
            self._measured += 1
            self._began = self._clock.mark()

    def end_step(self, ends: Sequence[End], step: int, samples: int, sinks: Any) -> None:
        """After a training step, on all stages alike.

        Args:
            samples: seen by all replicas so far, the x-axis of DeepSpeed's own events.
            sinks: DeepSpeed's monitor.
        """
        if self._off or (self._announced and not self._due):
            return
        first, self._announced = not self._announced, True
        if first:
            self._leave_notes(ends)
        step_ms = self._collect(ends)
        self._table.add_up(self._total)
        statuses = self._table.statuses
        if self._is_measured:
            self._last = self._table.channels, self._last[0]
        if Status.FAILED in statuses:
            self._off = True
            if statuses.index(Status.FAILED) == self._rank:
                self._say()
        elif self._reports:
            with self._guarded():
                channels = self._table.channels
                if first:
                    self._announce(channels, sinks)
                if self._sizes_unsaid:
                    self._say_sizes(channels)
                self._gathered, self._steps, self._ended = channels, step, time.perf_counter()
                if self._is_measured:
                    self._warn()
                    if self._writes:
                        self._write(channels, step_ms, samples, sinks)
            if self._failure:
                self._say()

    @property
    def _is_measured(self) -> bool:
        """Whether the step that was summed up last was measured, on all stages."""
        return all(status is Status.MEASURED for status in self._table.statuses)

    def message_quality(self) -> dict[tuple[int, str], MessageQuality]:
        """What the guard has limits for, of the step that was summed up last, by boundary and direction,
        known to all stages of the pipeline; empty where that was not measured."""
        if self._off or not self._is_measured:
            return {}
        now, before = self._last
        return {
            (number, direction): MessageQuality.of(values, before[number][direction] if before else {})
            for number, directions in enumerate(now)
            for direction, values in directions.items()
        }

    def _collect(self, ends: Sequence[End]) -> float:
        """Fill the table with what this stage knows; returns how long the step took, in milliseconds."""
        meters, step_ms = self._take_meters(), 0.0
        self._table.clear()
        with self._guarded():
            if meters:
                step_ms = self._clock.ms(self._began, self._clock.mark())
            for channel in (end.channel for end in ends if end.sends):
                self._table.fill(channel, self._counters(channel))
            for end, meter in meters:
                self._failure = self._failure or meter.failure
                values = meter.values()
                if end.sends:
                    values |= residual_values(end.channel, values["message_norm"])
                self._table.fill(end.channel, values)
                self._table.stamp(end.channel, int(not end.sends), meter.stamps(self._began))
        measured = Status.MEASURED if meters else Status.COUNTED
        self._table.set_status(self._rank, Status.FAILED if self._failure else measured)
        return step_ms

    def _take_meters(self) -> list[tuple[End, SendingMeter | ReceivingMeter]]:
        meters, self._meters = self._meters, []
        for end, _ in meters:
            end.meter = None
        return meters

    def _announce(self, channels: Channels, sinks: Any) -> None:
        print(lines.announcement(self.config, channels, self.link, self._notes.read), flush=True)
        if sinks.tb_monitor is not None:
            add_tensorboard_layout(sinks.tb_monitor.summary_writer, self.boundaries)

    def _say_sizes(self, channels: Channels) -> None:
        self._sizes_unsaid = False
        record_settings(self.config.settings)
        for note in lines.size_notes(self.config, channels):
            logger.warning(note)

    def _write(self, channels: Channels, step_ms: float, samples: int, sinks: Any) -> None:
        complete(channels, self._written, self._table.stamps, step_ms)
        self._written = channels
        sinks.write_events(self._events(channels, step_ms, samples))

    def _warn(self) -> None:
        """Of what is beyond the guard's limits, once for each of them and channel."""
        for place, judged in self.message_quality().items():
            found = judged.violations(self.config.block.guard)
            violations = [each for each in found if (*place, each.limit) not in self._warned]
            if violations:
                logger.warning(lines.violation_note(self.config, *place, violations))
                self._warned.update((*place, each.limit) for each in violations)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Round everything that may fail on this rank alone."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or in_one_line(error)

    def _say(self) -> None:
        if not self._said:
            logger.warning(
                "ds_compress: monitoring is off from here on, training goes on: stage %d: %s",
                self._rank,
                self._failure,
            )
        self._said = True

    def summary(self) -> str:
        """One line on the whole training as far as it was gathered; empty when it never was, or never
        again."""
        if not self._gathered or not self.config.block.monitor.every:
            return ""
        seconds = self._ended - self._started
        return lines.summary(self._gathered, self._first, self._steps, self._waited, seconds)

    def close(self) -> None:
        """At the end of training, on any rank at any time: no other rank is needed."""
        with self._guarded():
            line = self.summary()
            if line:
                print(line, flush=True)
        if self._failure:
            self._say()

    @staticmethod
    def _counters(channel: Channel) -> dict[str, float]:
        sent, latest = channel.sent, channel.sent.latest
        sizes = (latest.raw_bytes, latest.compressed_bytes(channel.codec)) if latest else (0, 0)
        return dict(zip(COUNTERS, (*sent.totals, *sizes)))

    def _leave_notes(self, ends: Sequence[End]) -> None:
        """What becomes of the tensors of each message that this rank sends."""
        with self._guarded():
            sent = [(end.channel, end.channel.sent.latest) for end in ends if end.sends]
            self._notes.leave({c.place: layout.describe(c.codec) for c, layout in sent if layout})

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
