"""Control the depth of the schedule: `link.depth`, or with "auto" the depth that measurements suggest.

The first batch of an engine has costs of its own. In the next ones each stage measures its passes, its codecs
and the memory of a micro-batch; then neighbours probe their links with a few packets. One collective gives
all of it to all ranks, and each computes the same depth. It applies from the next batch on, and is computed
again when the number of micro-batches changes, or after a checkpoint was loaded. Losses do not depend on the
depth.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ds_compress.config.block import LinkOptions
from ds_compress.message.part import Change, Engine, RuntimePart, StageView, Step
from ds_compress.planning.depth import DepthChoice, choose_depth
from ds_compress.planning.schedule import DepthSchedule, is_deepspeed_schedule
from ds_compress.planning.step_time import TransferPlan
from ds_compress.runtime.stage_profile import Row, StageProfiler, describe_links, gather, profile_cluster
from ds_compress.transport.staging import receives_hold_device

MEASURED = (2, 3)
"""Batches, counted from 1."""


class DepthController(RuntimePart):
    """The depth of the schedules and of the links of one engine."""

    key = "depth"

    def __init__(self, link: LinkOptions):
        self.now = 1 if link.depth == "auto" else link.depth
        self._link, self.auto = link, link.depth == "auto"
        self._batches = 0
        self._last = 0  # batch to measure
        self._micro_batches = 0  # of the counted batches
        self._chosen: dict[str, int] = {}  # the depth, and the pipeline that it was chosen for
        self._profiler: StageProfiler | None = None
        self.profiler: StageProfiler | None = None  # of the batch in progress

    def schedule(self, engine: Engine, pipe_schedule: Any) -> Any:
        """Return a deeper schedule in place of DeepSpeed's own, or `pipe_schedule` itself."""
        if self.now == 1 or not _is_ours(engine, pipe_schedule):
            return pipe_schedule
        place = pipe_schedule.micro_batches, pipe_schedule.stages, pipe_schedule.stage_id
        return DepthSchedule(*place, self.now)

    def describe(self, engine: Engine, pipe_schedule: Any) -> str:
        """Return what the start-up line says about the depth, by the schedule that runs."""
        if engine.num_stages == 1 or (not self.auto and self.now == 1):
            return ""
        if not self.auto and not isinstance(pipe_schedule, DepthSchedule):
            return f", depth {self.now} has no effect on this schedule"
        if not self.auto:
            few = f" instead of {self.now} (too few micro-batches)" if pipe_schedule.depth < self.now else ""
            return f", depth {pipe_schedule.depth}{few}"
        if engine.dynamic_shape:
            return f", depth auto, {self.now} because of dynamic_shape"
        if is_deepspeed_schedule(pipe_schedule) or isinstance(pipe_schedule, DepthSchedule):
            return f", depth auto, {self.now} until it is measured"
        return ", depth auto has no effect on this schedule"

    @contextmanager
    def measured(self, engine: Engine, stage: StageView, pipe_schedule: Any) -> Iterator[None]:
        """Measure a batch of training if it is due; `pipe_schedule`: DeepSpeed's; entered on every rank."""
        if not self._measures(engine, pipe_schedule):
            yield
            return
        if engine.micro_batches != self._micro_batches:
            self.measure_again()
            self._micro_batches = engine.micro_batches
        if not self._batches:
            self._last = self._last_measured(engine)
        self._batches += 1
        first = max(MEASURED[0], self._last - 1)
        if not first <= self._batches <= self._last:
            yield
            return
        self._profiler = self._profiler or StageProfiler(engine, stage)
        self.profiler = self._profiler
        try:
            # copies in the last batch take memory, so the first one measures it
            with self._profiler.batch(self._batches == first), self._watching(engine, stage):
                yield
        finally:
            self.profiler = None

    def end_step(self, step: Step) -> Change | None:
        """Choose the depth after the last measured batch."""
        if self._profiler is None or self._batches != self._last:
            return None
        profiler, self._profiler = self._profiler, None
        change = self._choose(step.engine, step.stage, profiler.row())
        self._chosen = {"depth": self.now, **_pipeline(step.engine)} if self.auto else {}
        return change

    def state(self) -> dict[str, Any]:
        return self._chosen

    def resume(self, step: Step, state: Mapping[str, Any], own: object) -> None:
        """Go on at the depth of a checkpoint of the same pipeline, or at 1; measure again, as links or memory
        may have changed."""
        if self.auto:
            is_same = _pipeline(step.engine).items() <= state.items()
            self._chosen = dict(state) if is_same else {}
            self.set(step.stage, self._chosen.get("depth", 1))
        self.measure_again()

    def measure_again(self) -> None:
        """Measure again in the next batches; until then the depth stays as it is."""
        self._batches, self._profiler = 0, None

    def set(self, stage: StageView, depth: int) -> None:
        """Run the next batches at `depth`; called between two batches, on every rank."""
        self.now = depth
        for end in stage.ends:
            end.link.depth = end.extra_link.depth = depth

    def _measures(self, engine: Engine, pipe_schedule: Any) -> bool:
        """Return whether batches are measured."""
        has_links = engine.num_stages > 1 and not engine.dynamic_shape
        return self.auto and has_links and _is_ours(engine, pipe_schedule)

    def _last_measured(self, engine: Engine) -> int:
        """Return how many batches from now the last measured one is; the one before it is measured too."""
        return MEASURED[-1]

    def _watching(self, engine: Engine, stage: StageView) -> AbstractContextManager[None]:
        """Watch the messages of a measured batch."""
        return nullcontext()

    def _choose(self, engine: Engine, stage: StageView, row: Row) -> Change | None:
        rows = gather(row, engine.device)
        choice = decide(rows, engine.micro_batches, self.now, self._link.memory_gb, engine.device)
        self.set(stage, choice.depth if choice else 1)
        if engine.global_rank == 0:
            print(format_choice(choice, rows), flush=True)
        return None


def _pipeline(engine: Engine) -> dict[str, int]:
    return {"stages": engine.num_stages, "micro_batches": engine.micro_batches}


def _is_ours(engine: Engine, pipe_schedule: Any) -> bool:
    """Return whether a deeper schedule may replace it."""
    # A shape message waits until the next stage asks for it, and that stage's device may wait until this one
    # asks for a gradient (tests/transport/test_posting.py)
    waits = engine.dynamic_shape and receives_hold_device(engine.device)
    return is_deepspeed_schedule(pipe_schedule) and not waits


def decide(
    rows: Sequence[Row], micro_batches: int, depth: int, memory_gb: float | None, device: torch.device
) -> DepthChoice | None:
    """Choose the depth from what all ranks measured at `depth`; None if the memory use is unknown."""
    found = profile_cluster(rows, micro_batches, depth, memory_gb, device)
    if found.memory_budgets is None:
        return None
    plan = TransferPlan(found.forward, found.backward, eager=True)
    return choose_depth(found.workload, plan, found.networks, found.memory_budgets)


def format_choice(choice: DepthChoice | None, rows: Sequence[Row]) -> str:
    """Format the line that reports the chosen depth."""
    if choice is None:
        return "ds_compress: link depth 1 chosen: what a micro-batch holds in memory cannot be measured here"
    memory = max(choice.memory) / 1e6
    step = f"step {choice.step_at_1:.3g} s"
    if choice.depth > 1:
        gain = choice.step_at_1 / choice.step
        step += f" -> {choice.step:.3g} s as predicted ({gain:.2f} times as fast)"
    capped = "; deeper would be faster, and needs more memory (link.memory_gb)" if choice.capped else ""
    return (
        f"ds_compress: link depth {choice.depth} chosen: {step}; {describe_links(rows)}; "
        f"{memory:,.3g} MB in flight on a stage{capped}"
    )
