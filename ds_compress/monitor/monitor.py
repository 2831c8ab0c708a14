"""Gather counters and measurements on the first stage, and write them to DeepSpeed's monitors."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed import Store

from ds_compress.config import KEY, Config
from ds_compress.config.policies import ChannelKey
from ds_compress.errors import in_one_line
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.message.clock import clock_for
from ds_compress.message.gradient_error import AVERAGED, GradientError
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.message.part import Engine, RuntimePart, Step
from ds_compress.monitor import lines, metrics
from ds_compress.monitor.guard_limits import LASTING, MessageQuality, finite
from ds_compress.monitor.table import Status, Table

End = SendingEnd | ReceivingEnd
Events = list[tuple[str, float, int]]

logger = logging.getLogger("ds_compress")


class Monitor(RuntimePart):
    """Prints the active settings, writes metrics every N steps, and prints a summary at the end.

    Only steps that will be written are measured; all stages know beforehand which ones. Monitoring never
    stops training. The first error of any stage or sink is logged as one warning, and switches monitoring
    off on all stages at the next all-reduce, which every stage enters even after an error. Steps that a guard
    judges that may stop training are still measured.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        boundaries: int,
        link: str,
        notes: Store,
        gradients: Mapping[str, str],
    ):
        """Create the monitor of one rank.

        Args:
            engine: DeepSpeed's; it is not kept.
            boundaries: number of boundaries of the pipeline.
            link: name of the link in the start-up line.
            notes: where ranks leave lines for the reporting one.
            gradients: as for `lines.announcement`.
        """
        self.config = config
        self.boundaries = boundaries
        self.ranks = engine.num_stages  # each with one stage or more
        self._rank = engine.stage_id
        self.link = link
        self._group = engine.grid.get_pipe_parallel_group()  # the stages of this pipeline
        self._notes = notes
        self._reports = engine.global_rank == 0  # for all; it has a first stage
        self._exchanged = gradients
        self._announced = False
        self._meters: list[tuple[End, SendingMeter | ReceivingMeter]] = []
        self._clock = clock_for(engine.device)
        self._table = Table(boundaries, self.ranks, engine.device)
        self._due = False  # whether the current step is reduced over the stages
        self._writes = False  # whether it is also written
        self._measures = False  # whether the present step is measured
        self._gradient_errors: dict[int, GradientError] = {}  # by boundary, of what this rank sends
        self._began: Any = None  # clock mark at the start of the measured step
        self._failure = ""  # first error of this rank, in one line
        self._is_logged, self._off, self._sizes_pending = False, False, True
        # codecs that were warned of; settings that alternate are not warned of again and again
        self._warned: set[tuple[int, str, str, str]] = set()  # (boundary, direction, codec, limit)
        self._larger: set[tuple[int, str, str]] = set()  # (boundary, direction, codec)
        self._gathered: metrics.Channels = {}
        self._gradients: dict[str, list[dict[str, float]]] = {}  # of the last reduced step, by kind and stage
        self._written, self._written_gradients = self._table.channels, self._table.gradients  # zeros
        # of the last measured step, and of the one before
        self._last: tuple[metrics.Channels, metrics.Channels] = {}, {}
        self._first = self._steps = 0  # number of the first step of this run, and of the last reduced one
        self._waited = lines.Waited()

    def follow(self) -> None:
        """Report codecs after the config has changed: message sizes and limit warnings of new ones."""
        self._gradient_errors.clear()
        self._sizes_pending = True

    def begin_step(self, step: Step) -> None:
        """Prepare to measure a training step, if it is due."""
        sinks, judged = step.engine.monitor, step.is_judged
        self._first = self._first or step.number
        every = self.config.block.monitor.every
        counted = every > 0 and step.number % every == 0
        summed = counted or judged or lines.is_early(step.number - self._first + 1, every)
        stops = judged and self.config.block.guard.action != "warn"  # it needs no sink
        self._due = stops or (summed and not self._off)
        self._failure = "" if self._off else self._failure
        self._writes = counted and sinks.enabled
        self._take_meters()  # left by an interrupted step
        self._measures = self._due and (self._writes or judged)
        if not self._measures:
            return
        with self._guarded():
            if stops:
                self._gradient_errors.clear()  # a resumed run decides by the same messages
            # each micro-batch in turn, and after a resume the same ones
            number = step.number
            turn = number // every - 1 if counted else number // self.config.block.guard.every
            one, several = {turn % step.engine.micro_batches}, range(AVERAGED)
            for end in step.stage.ends:
                meter: SendingMeter | ReceivingMeter = ReceivingMeter(self._clock)
                if isinstance(end, SendingEnd):
                    gradients = None
                    if end.channel.direction == "backward":
                        boundary = end.channel.boundary.number
                        gradients = self._gradient_errors.setdefault(boundary, GradientError())
                    compared = several if judged and gradients is not None else one
                    meter = SendingMeter(self._clock, compared, gradients)
                end.observers.append(meter)
                self._meters.append((end, meter))
            self._began = self._clock.mark()

    def end_step(self, step: Step) -> None:
        """Collect, reduce and report the values of a training step; all stages call it."""
        sinks = step.engine.monitor
        if self._announced and not self._due:
            return
        first, self._announced = not self._announced, True
        step_ms = self._collect(step, first)
        self._table.add_up(self._group)
        statuses = self._table.statuses
        if self._is_measured:
            self._last = self._table.channels, self._last[0]
        if Status.FAILED in statuses:
            self._off = True
            if statuses.index(Status.FAILED) == self._rank:
                self._log_failure()
        elif self._reports and not self._off:
            with self._guarded():
                channels = self._table.channels
                if first:
                    link, read = self.link, self._read_note
                    line = lines.announcement(self.config, channels, link, read, self._exchanged)
                    print(line, flush=True)
                    if sinks.tb_monitor is not None:
                        add_tensorboard_layout(sinks.tb_monitor.summary_writer, self.boundaries)
                if self._sizes_pending:  # of the active codecs
                    self._sizes_pending = False
                    record_settings(KEY, self.config.settings)
                    for note in lines.size_notes(self.config, channels, self._larger):
                        logger.warning(note)
                self._gathered, self._steps = channels, step.number
                self._gradients = self._table.gradients
                if self._is_measured:
                    self._warn()
                    if self._writes:
                        metrics.complete(channels, self._written, self._table.stamps, step_ms)
                        self._written = channels
                        sinks.write_events(self._events(channels, step_ms, step.engine.global_samples))
            self._log_failure()

    def _read_note(self, place: str) -> str:
        """Return how messages of a channel are compressed, as the rank that sends them says it; else ""."""
        return self._notes.get(place).decode() if self._notes.check([place]) else ""

    def write(self, engine: Engine, values: Mapping[str, float]) -> None:
        """Write values of an evaluation, by name in `metrics.EVALUATIONS`, if this rank reports."""
        if self._off or not self._reports or not engine.monitor.enabled:
            return
        with self._guarded():
            samples = engine.global_samples
            engine.monitor.write_events([(metrics.label(name), values[name], samples) for name in values])
        self._log_failure()

    @property
    def _is_measured(self) -> bool:
        """Return whether the last reduced step was measured on all stages."""
        return all(status is Status.MEASURED for status in self._table.statuses)

    def message_quality(self) -> dict[ChannelKey, MessageQuality]:
        """Return the values that the guard limits, of the last reduced step, by boundary and direction.

        All stages of the pipeline get the same values; the dict is empty if the step was not measured.
        """
        if not self._is_measured:
            return {}
        now, before = self._last
        return {key: MessageQuality.of(values, before.get(key, {}), key[1]) for key, values in now.items()}

    def own_state(self) -> dict[str, list[float]]:
        """Return what the guard judges the next measured step by."""
        return {
            f"{number}/{direction}": [finite(values[name]) for name in LASTING]
            for (number, direction), values in self._last[0].items()
        }

    def resume(self, step: Step, state: object, own: Mapping[str, list[float]]) -> None:
        before = {}
        for place, values in own.items():
            number, _, direction = place.partition("/")
            if direction:  # the others are not of the monitor
                before[int(number), direction] = dict(zip(LASTING, values))
        self._last = before, {}
        self._table.clear()  # no step is measured since

    def _collect(self, step: Step, notes: bool) -> float:
        """Fill the table with this stage's values; return the duration of the step in ms.

        Args:
            notes: whether the reporting rank is told how messages of this rank are compressed.
        """
        meters, step_ms = self._take_meters(), 0.0
        self._table.clear()
        with self._guarded():
            if self._measures:
                step_ms = self._clock.ms(self._began, self._clock.mark())
            for kind, values_of in step.values.items():
                self._table.fill_gradients(kind, self._rank, values_of())
            for channel in (end.channel for end in step.stage.ends if end.sends):
                sent, latest = channel.sent, channel.sent.latest
                sizes = (latest.raw_bytes, latest.compressed_bytes(channel.codec)) if latest else (0, 0)
                self._table.fill(channel, dict(zip(metrics.COUNTERS, (*sent.totals, *sizes))))
                if notes and latest:
                    self._notes.set(channel.place, latest.describe(channel.codec))
            for end, meter in meters:
                self._failure = self._failure or meter.failure
                values = meter.values()
                if end.sends:
                    values |= metrics.residual_values(end.channel, values["message_norm"])
                self._table.fill(end.channel, values)
                self._table.stamp(end.channel, int(not end.sends), meter.stamps(self._began))
        measured = Status.MEASURED if self._measures else Status.COUNTED
        self._table.set_status(self._rank, Status.FAILED if self._failure else measured)
        return step_ms

    def _take_meters(self) -> list[tuple[End, SendingMeter | ReceivingMeter]]:
        """Detach all meters from their endpoints and return them."""
        meters, self._meters = self._meters, []
        for end, meter in meters:
            end.observers.remove(meter)
        return meters

    def _warn(self) -> None:
        """Log the worst values beyond the guard's limits: one line for all channels with the same direction,
        codec and limits, once per channel, codec and limit."""
        guard, over = self.config.block.guard, dict[tuple[str, str, tuple[str, ...]], dict[int, Any]]()
        for (number, direction), judged in self.message_quality().items():
            codec = str(getattr(self.config.in_force.codecs(number), direction))
            place = number, direction, codec
            found = (each.limit for each in judged.violations(guard))
            limits = tuple(each for each in found if (*place, each) not in self._warned)
            self._warned.update((*place, each) for each in limits)
            if limits:
                over.setdefault((direction, codec, limits), {})[number] = judged
        for (direction, _, limits), alike in over.items():
            violations = MessageQuality.worst(alike.values()).violations(guard)
            said = [each for each in violations if each.limit in limits]
            logger.warning(lines.violation_note(self.config, [*alike], direction, said))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Catch errors of this rank and record the first, so that monitoring never stops training."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or in_one_line(error)

    def _log_failure(self) -> None:
        """Log the failure that switches monitoring off, if there is one, once."""
        if self._failure and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "ds_compress: monitoring is off from now on, training continues: "
                f"stage {self._rank}: {self._failure}"
            )

    def summary(self) -> str:
        """Return a one-line summary of the training so far; empty if nothing was gathered."""
        if not self._steps or not self.config.block.monitor.every:
            return ""
        sent = self._gathered, self._first, self._steps, self._waited, self._gradients
        return lines.summary(*sent, self._exchanged)

    def close(self) -> None:
        """Print the summary at the end of training; needs no other rank, so any rank calls it at any time."""
        with self._guarded():
            line = self.summary()
            if line:
                print(line, flush=True)
        self._log_failure()

    def _events(self, channels: metrics.Channels, step_ms: float, samples: int) -> Events:
        """Return the metrics of a measured step as (label, value, samples)."""
        events = [
            (metrics.label(name, *key), values[name], samples)
            for key, values in channels.items()
            for name in metrics.CHANNEL
        ]
        events += self._gradient_events(samples)
        stages = [metrics.stage_ms(channels, stage) for stage in range(self.boundaries + 1)]
        waited_ms = sum(spent["wait"] + spent["send"] for spent in stages) / self.ranks
        self._waited.add(waited_ms / step_ms, 1e-3 * waited_ms)
        uncompressed = metrics.uncompressed_step_ms(step_ms, channels, self.ranks)
        whole = {"step_ms": step_ms, "uncompressed_step_ms": uncompressed}
        return events + [(metrics.label(name), value, samples) for name, value in whole.items()]

    def _gradient_events(self, samples: int) -> Events:
        """Return the metrics of gradients that stages exchange as (label, value, samples)."""
        events, before, self._written_gradients = Events(), self._written_gradients, self._gradients
        for kind in self._exchanged:
            for stage, values in enumerate(self._gradients[kind]):
                if kind == "tied" and not values["members"]:  # this stage has no copy
                    continue
                raw, wire = (values[key] - before[kind][stage][key] for key in ("raw_bytes", "wire_bytes"))
                found = {**values, "ratio": metrics.ratio(raw, wire)}
                for name in metrics.EXCHANGE:
                    events.append((metrics.exchange_label(kind, stage, name), found[name], samples))
        return events


def record_settings(key: str, settings: dict[str, Any]) -> None:
    """Put settings into the config of the W&B run that this process has, if it has one."""
    if run := _find_wandb_run():
        run.config.update({key: settings}, allow_val_change=True)


def record_results(results: dict[str, Any]) -> None:
    """Put results into the summary of the W&B run that this process has, if it has one."""
    if run := _find_wandb_run():
        run.summary.update(results)


def _find_wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)  # nobody has a run without having imported it


def add_tensorboard_layout(writer: Any, boundaries: int) -> None:
    """Give TensorBoard's "Custom Scalars" page a chart per quantity, with all channels of a pipeline in each.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
    """
    writer.add_custom_scalars(
        {
            f"Compression: {title}": {name: ["Multiline", metrics.labels(boundaries, name)] for name in names}
            for title, names in metrics.DASHBOARD.items()
        }
    )
