"""The session: all that ds_compress adds to one of DeepSpeed's engines, as `engine.ds_compress`.

A session owns the message path of its rank, and the parts of the runtime that observe training and decide.
The parts do not know each other or the session: it calls their hooks before and after each step, and applies
the settings that they return. All ranks adopt the same settings at the same step, with no message in flight:
they decide from numbers that one collective has given to all (see runtime/depth.py).
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed import Store

from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.recipes import with_changes
from ds_compress.engine.deepspeed import PipelineEngine, steps_per_epoch
from ds_compress.engine.evaluation import replay
from ds_compress.engine.message_path import MessagePath
from ds_compress.engine.new_kernels import NewKernels
from ds_compress.engine.replica_gradients import connect_replicas
from ds_compress.engine.tied_gradients import connect_copies
from ds_compress.engine.wiring import set_connections, wire_extra_links
from ds_compress.errors import CompressionError
from ds_compress.message.part import Change, RuntimePart, Step
from ds_compress.monitor.monitor import Monitor
from ds_compress.runtime.auto import AutoController
from ds_compress.runtime.connections import ConnectionsController
from ds_compress.runtime.depth import DepthController
from ds_compress.runtime.guard import Guard
from ds_compress.runtime.policy import PolicyController
from ds_compress.runtime.replica_check import ReplicaCheck
from ds_compress.runtime.watchdog import Watchdog
from ds_compress.transport.collectives import all_gather

MUST_MATCH = (*DIRECTIONS, "boundaries", "policy", "quality")
"""Keys of the block that have to be the same for a checkpoint's settings to go on."""


class Session:
    """The message path of one rank, and the parts that watch it and decide."""

    eval_losses: Mapping[str, float] | None = None
    """Losses of the last evaluation, compressed and uncompressed, if "eval" is "both"; on every rank."""

    def __init__(
        self,
        engine: PipelineEngine,
        config: Config,
        boundaries: int,
        connect: Callable[[int], MessagePath],
        watchdog: Watchdog,
        notes: Store,
        outer: Any,
    ):
        """Build the path and the parts of this rank; every rank of the job calls it.

        Args:
            engine: DeepSpeed's, already of a class with the mixin.
            config: prepared.
            boundaries: of the pipeline.
            connect: builds the path, with links for schedules of the depth that it is given.
            watchdog: of the job.
            notes: takes lines of every rank of the pipeline to the one that reports.
            outer: the part that exchanges weights between launches; None: replicas are of one launch.
        """
        self.engine = engine
        self.config = config
        self.watchdog = watchdog
        self.depth = AutoController(config) if config.quality else DepthController(config.block.link)
        self.path = connect(self.depth.now)
        self.stage = self.path.stage
        self.new_kernels = NewKernels(config, self.stage, engine.device)
        self.gradients = connect_replicas(engine, self.stage)
        self.tied, tied_note = connect_copies(engine, self.stage, self.path.original)
        exchanges = [each for each in (self.gradients, self.tied) if each is not None]
        self.traffic = {each.kind: each for each in (*exchanges, outer) if each is not None}
        """What sends gradients, or changes of weights, beside messages, by kind."""
        self.guard = Guard(config, engine.global_rank, boundaries)
        self.replica_check = ReplicaCheck(self.stage, self.path.sides(), engine.grid, engine.device)
        exchanged = {kind: each.describe() for kind, each in self.traffic.items()}
        exchanged |= {"tied": tied_note} if tied_note else {}
        link = self.path.own_link or config.block.link.mode
        self.monitor = Monitor(config, engine, boundaries, link, notes, exchanged)
        self.policy = PolicyController(config, boundaries, engine.device, all_gather)
        chooses = config.block.link.connections == "auto"
        self.connections = ConnectionsController(set_connections) if chooses else None
        always = *exchanges, self.replica_check, self.monitor, self.guard, self.depth, self.policy
        parts = (*always, outer, self.connections)
        self.parts: list[RuntimePart] = [part for part in parts if part is not None]
        """In the order in which their hooks are called."""
        written = {name: config.settings[name] for name in MUST_MATCH}
        self._written = json.loads(json.dumps({**written, "number of boundaries": boundaries}))
        self._resume_parts({}, {})

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Wrap a `train_batch` of the engine: the guard checks some of them."""
        engine, monitor, count = self.engine, self.monitor, self.path.evaluated_at_least()
        again = functools.partial(replay, engine, self.stage.boundaries)
        with (
            self.watchdog.watch("train_batch"),
            self.guard.batch(engine, count, monitor.message_quality, monitor.write, again),
        ):
            self.path.in_train_batch = True
            try:
                yield
            finally:
                self.path.in_train_batch = False

    @contextmanager
    def running(self, asked: Any) -> Iterator[Any]:
        """Run a schedule of the engine, of training or evaluation; yield the one to execute instead."""
        engine, path, depth = self.engine, self.path, self.depth
        deeper, context = depth.schedule(engine, asked), path.step_context()
        measured: AbstractContextManager[None] = contextlib.nullcontext()
        if context.training:
            self.begin_step()
            measured = depth.measured(engine, self.stage, asked)
        in_order = self.new_kernels.must_run_in_order(context)
        chosen = asked if in_order else deeper
        with path.looking_ahead(chosen, depth.now, in_order) as counts:
            with measured, self.stage.running(context, counts):
                path.post_receives(context.training)
                yield chosen
            self.monitor.link = path.describe_link(depth.describe(engine, deeper))
        if context.training:
            self.end_step()

    def begin_step(self) -> None:
        """Let the parts know that a training step begins."""
        engine, step = self.engine, self.engine.global_steps + 1
        steps = steps_per_epoch(engine) if self.config.block.warmup_epochs else None
        if steps:
            self.config.count_epochs(steps, engine.global_steps)
        begun = Step(step, engine, self.stage, self.guard.judges(step))
        for part in self.parts:
            part.begin_step(begun)

    def end_step(self) -> None:
        """Let the parts know that a training step is over, and do what they ask for; nothing is in flight."""
        values = {kind: each.values for kind, each in self.traffic.items()}
        done = Step(self.engine.global_steps, self.engine, self.stage, values=values)
        for part in self.parts:
            self._put_in_force(part.end_step(done))

    def reconfigure(self, boundaries: Mapping[str, Any]) -> bool:
        """Let boundaries have other settings from the next step on; every rank calls it alike, between two
        steps.

        From the next message on, both ends of every channel use the layouts, sizes and fingerprints of the
        new codecs. A feedback with unchanged settings keeps its state.

        Args:
            boundaries: as the block has them, {"0": {"forward": {"codec": "bf16"}}}; a codec or a feedback
                that is not given stays as it is.

        Returns:
            Whether any setting differs from those before.

        Raises:
            CompressionError: the settings are not allowed, or cannot begin while training runs.
        """
        return self._adopt(with_changes(self.config.adopted, boundaries))

    def _adopt(self, adopted: dict[str, Any]) -> bool:
        stage, stages = self.stage, self.engine.num_stages
        if stage.in_schedule:
            raise CompressionError(
                f"{KEY}: settings cannot change while a step runs; adopt between two steps"
            )
        compressed = self.config.compresses
        if not self.config.adopt(adopted, lambda other: self.path.check(other, stages)):
            return False
        if self.config.compresses and not compressed:  # nobody looked which tensors depend on parameters
            self.engine.reset_activation_shape()
        wire_extra_links(stage, self.engine)
        stage.adopt()
        for part in self.parts:
            part.follow()
        return True

    def state(self) -> dict[str, Any]:
        """Return the settings after all changes and the state of the parts, as JSON types, for a checkpoint:
        the same on every rank."""
        parts = {part.key: part.state() for part in self.parts if part.key}
        return {"written": self._written, "adopted": self.config.adopted, **parts}

    def own_state(self) -> dict[str, list[float]]:
        """Return what this rank alone has measured, for a checkpoint (`RuntimePart.own_state`)."""
        return {key: values for part in self.parts for key, values in part.own_state().items()}

    def resume(self, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> bool:
        """Adopt the settings and the states of a checkpoint; every rank calls it alike.

        Args:
            state: what `state` returned, the same on every rank; empty: there is none.
            own: what `own_state` returned.

        Returns:
            Whether the checkpoint is of a run with the same block and boundaries; if not, settings start
            again from the block, and parts begin anew.
        """
        resumed = bool(state.get("written") == self._written)
        self._adopt(state["adopted"] if resumed else {})
        self._resume_parts(state if resumed else {}, own if resumed else {})
        return resumed

    def _resume_parts(self, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> None:
        step = Step(self.engine.global_steps, self.engine, self.stage)
        for part in self.parts:
            self._put_in_force(part.resume(step, state.get(part.key, {}), own))

    def _put_in_force(self, change: Change | None) -> None:
        if change is not None:
            if change.boundaries:
                self.reconfigure(change.boundaries)
            if self.engine.global_rank == 0:
                change.report()
