"""The session: all that ds_compress adds to one of DeepSpeed's engines, as `engine.ds_compress`.

A session owns the stage of its rank, and the parts of the runtime that observe training and decide. The parts
do not know each other or the session: it calls their hooks before and after each step, and applies the
settings that they return.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.checkpoint.search import Side
from ds_compress.config import Config
from ds_compress.engine.deepspeed import (
    evaluate,
    evaluating,
    instruction_map,
    is_deepspeeds,
    layer_range,
    loss_scale,
)
from ds_compress.engine.gradients import connect_replicas
from ds_compress.engine.handshake import Notes, SharedWarning
from ds_compress.engine.intercept import (
    PointToPoint,
    Receiving,
    Sending,
    Specs,
    is_alike,
    refuse,
)
from ds_compress.engine.lookahead import MADE_BY, Lookahead
from ds_compress.engine.reconfigure import Reconfigurator
from ds_compress.engine.stage import Instruction, Stage, StepContext
from ds_compress.engine.wiring import wire
from ds_compress.message.channel import Boundary, Channel, Mode, evaluated
from ds_compress.message.dependence import DependencyTracker
from ds_compress.message.layout import as_list, tensors_in
from ds_compress.message.part import Change, RuntimePart, Step
from ds_compress.monitor.monitor import Monitor
from ds_compress.runtime.auto import AutoController
from ds_compress.runtime.depth import DepthController
from ds_compress.runtime.guard import Guard
from ds_compress.runtime.policy import PolicyController, ReplicaPolicy
from ds_compress.runtime.replica_check import ReplicaCheck
from ds_compress.runtime.stage_profile import all_gather
from ds_compress.runtime.watchdog import Watchdog

RECEIVED = {
    Instruction.RECV_ACTIVATION: schedule.RecvActivation,
    Instruction.RECV_GRAD: schedule.RecvGrad,
}


def steps_per_epoch(engine: Any) -> int | None:
    """Return the training steps in one pass over the data that DeepSpeed was given; None if their number is
    not known."""
    try:
        return -(-len(engine.training_data) // engine.train_batch_size())
    except TypeError:
        return None


class Session:
    """The stage of one rank, and the parts that watch it and decide."""

    own_link: ClassVar[str | None] = None
    """The name of what moves packets, where link.mode has no effect."""
    gives_losses = True
    """Whether what `eval_batch` returns is a loss; a program that makes it something else sets False."""
    eval_losses: Mapping[str, float] | None = None
    """Losses of the last evaluation, compressed and uncompressed, if "eval" is "both"; on every rank."""

    def __init__(
        self,
        engine: Any,
        config: Config,
        p2p: PointToPoint,
        original: Mapping[type, Callable[..., None]],
        watchdog: Watchdog,
        notes: Notes,
        left_alone: SharedWarning,
        outer: Any,
    ):
        """Build the boundaries, links and parts of this rank; every rank of the job calls it.

        Args:
            engine: DeepSpeed's, already of a class with the mixin.
            config: prepared.
            p2p: stands in for DeepSpeed's point-to-point module.
            original: DeepSpeed's functions, by instruction.
            watchdog: of the job.
            notes: takes lines of every rank of the pipeline to the one that reports.
            left_alone: takes the warning that messages are left to DeepSpeed.
            outer: the part that exchanges weights between launches; None: replicas are of one launch.
        """
        boundaries = self.check(config, engine.num_stages)
        self.engine = engine
        self.config = config
        self.original = original
        self.watchdog = watchdog
        self._left_alone = left_alone
        self.lookahead = Lookahead()  # of the schedule in progress, or of none
        self.is_eager = config.block.link.mode == "eager" and self.own_link is None
        self.depth = AutoController(config) if config.quality else DepthController(config.block.link)
        self.stage = self.connect(p2p)
        used = {channel.codec.name for b in self.stage.boundaries for channel in b.channels}
        is_lossy = config.has_policy or config.quality is not None or used - {"none"}
        follows = is_lossy and config.block.tensors == "large"
        self.tracking = DependencyTracker(engine.module) if follows else None
        self.gradients = connect_replicas(engine, config)
        if self.gradients is not None:
            self.stage.groups.append(self.gradients.exchange.replicas.group)
        self.replicas = outer or self.gradients
        self.guard = Guard(config, engine.global_rank, boundaries)
        self.replica_check = ReplicaCheck(self.stage, self.sides(), engine.grid, engine.device)
        self.monitor = Monitor(
            config,
            boundaries=boundaries,
            ranks=engine.num_stages,
            rank=engine.stage_id,
            device=engine.device,
            link=self.own_link or config.block.link.mode,
            total=functools.partial(dist.all_reduce, group=engine.grid.get_pipe_parallel_group()),
            notes=notes,
            reports=engine.global_rank == 0,
            replicas=self.replicas.describe() if self.replicas else "",
        )
        self.policy = PolicyController(config, boundaries, engine.device, all_gather)
        self.replica_policy = None
        if self.gradients is not None and config.replica_ladder:
            shared = engine.num_stages, engine.device, all_gather
            self.replica_policy = ReplicaPolicy(config, [self.gradients.exchange], *shared)
        found = self.gradients, self.replica_check, self.monitor, self.depth, self.policy, self.replica_policy
        self.parts: list[RuntimePart] = [part for part in (*found, outer) if part is not None]
        """In the order in which their hooks are called."""
        watching = self.guard, self.replica_check, self.monitor
        self.reconfigurator = Reconfigurator(engine.num_stages, self.stage, boundaries, self.check, watching)
        self._start_policy()

    @staticmethod
    def check(config: Config, stages: int) -> int:
        """Check that the engine supports `config`; return the boundaries of a pipeline of `stages` ranks.

        Raises:
            CompressionError: the engine does not support a setting.
        """
        config.check_boundaries(stages - 1)
        return stages - 1

    def connect(self, p2p: PointToPoint) -> Stage:
        """Return this rank's stage, connected with its neighbours."""
        engine, config = self.engine, self.config
        number, replica = engine.stage_id, engine.grid.get_data_parallel_id()
        before = Boundary(number - 1, config, replica) if number > 0 else None
        after = Boundary(number, config, replica) if number < engine.num_stages - 1 else None
        stage = Stage(config, p2p, before, after)
        wire(stage, engine, self.depth.now)
        return stage

    def sides(self) -> list[Side]:
        """Return the sides of boundaries that this rank has, with the layers behind them."""
        stage, (first, end) = self.stage, layer_range(self.engine.module)
        before = [Side(stage.before, first, "downstream")] if stage.before else []
        after = [Side(stage.after, end, "upstream")] if stage.after else []
        return before + after

    def boundary_of_shapes(self, sends: bool) -> Boundary:
        """Return the boundary whose shapes DeepSpeed sends, or receives, at present."""
        boundary = self.stage.after if sends else self.stage.before
        assert boundary is not None
        return boundary

    def evaluated_at_least(self) -> int:
        """Return the least number of micro-batches that the schedule of an evaluation takes."""
        return 1

    def step_context(self) -> StepContext:
        """Return what messages from now on have in common."""
        engine = self.engine
        training = torch.is_grad_enabled() and engine.module.training
        masked = engine.has_attention_mask or engine.has_bool_tensors
        return StepContext(engine.global_steps, training, loss_scale(engine), int(masked))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Wrap a `train_batch` of the engine: the guard checks some of them."""
        engine, guard = self.engine, self.guard
        with self.watchdog.watch("train_batch"):
            guard.begin_batch(engine.global_steps + 1, self.evaluated_at_least())
            yield
            if guard.compares_losses(engine.global_steps):
                guard.check_limits(engine, self.monitor.message_quality())
            if guard.due:
                guard.check_loss(engine, self._replay)
            guard.end_batch(getattr(engine, "agg_train_loss", None))

    @contextmanager
    def evaluation(self, mode: Mode) -> Iterator[None]:
        """Evaluate with compression or without; nothing of the state of training changes."""
        devices = [self.engine.device] if self.engine.device.type == "cuda" else []
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with (
                torch.random.fork_rng(devices),
                torch.no_grad(),
                evaluating(self.engine),
                evaluated(self.stage.boundaries, mode),
            ):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def _replay(self, mode: Mode, micro_batches: int) -> list[Any]:
        """Evaluate micro-batches that the guard gives the engine; return what the last stage puts out."""
        with self.evaluation(mode):
            return evaluate(self.engine, micro_batches)

    @contextmanager
    def running(self, asked: Any) -> Iterator[Any]:
        """Run a batch of the engine; yield the schedule to execute instead of `asked`."""
        engine, stage = self.engine, self.stage
        pipe_schedule, context = self.depth.schedule(engine, asked), self.step_context()
        measured: AbstractContextManager[None] = contextlib.nullcontext()
        if context.training:
            self.begin_step()
            measured = self.depth.measured(engine, stage, asked)
        with self._looking_ahead(pipe_schedule) as counts:
            with measured, stage.running(context, counts):
                self.post_receives(context.training)
                yield pipe_schedule
            self.monitor.link = self._link(pipe_schedule)
        if context.training:
            self.end_step()

    def begin_step(self) -> None:
        """Let the parts know that a training step begins."""
        engine, step = self.engine, self.engine.global_steps + 1
        steps = steps_per_epoch(engine) if self.config.block.warmup_epochs else None
        if steps:
            self.config.count_epochs(steps, engine.global_steps)
        begun = Step(step, engine, self.stage, self.guard.compares_losses(step))
        for part in self.parts:
            part.begin_step(begun)

    def end_step(self) -> None:
        """Let the parts know that a training step is over, and do what they ask for; nothing is in flight."""
        values = self.replicas.values if self.replicas is not None else None
        done = Step(self.engine.global_steps, self.engine, self.stage, values=values)
        for part in self.parts:
            self._put_in_force(part.end_step(done))

    def reconfigure(self, boundaries: Mapping[str, Any]) -> bool:
        """Let boundaries have other settings from the next step on (`Reconfigurator.change`)."""
        return self.reconfigurator.change(boundaries)

    def resume(
        self, changed_settings: Mapping[str, Any], own_measurements: Mapping[str, list[float]]
    ) -> bool:
        """Adopt the settings of a checkpoint; every rank calls it alike.

        Args:
            changed_settings: of `changed_settings`, the same on every rank; empty: there are none.
            own_measurements: what this rank alone knew (`own_measurements`).

        Returns:
            Whether the checkpoint is of a run with the same block and boundaries; if not, settings start
            again from the block.
        """
        resumed = self.reconfigurator.resume(changed_settings)
        measured = {key: values for key, values in own_measurements.items() if "/" in key}
        self.monitor.resume(measured if resumed else {})
        self.guard.resume(changed_settings.get("guard", {}) if resumed else {})
        if resumed:
            self.policy.resume(
                changed_settings["policy"],
                {key: own_measurements[key] for key in own_measurements.keys() - measured},
            )
        else:
            self._start_policy()
        if self.replica_policy is not None:
            saved = changed_settings.get("replica_policy", {})
            self.replica_policy.resume(saved, self.engine.global_steps)
        return resumed

    def own_measurements(self) -> dict[str, list[float]]:
        """Return what this rank alone has measured for its policy and its guard, for a checkpoint."""
        return self.policy.own_measurements() | self.monitor.own_measurements()

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings after all changes, for a checkpoint: the same on every rank."""
        between = {"replica_policy": self.replica_policy.state()} if self.replica_policy is not None else {}
        return {
            **self.reconfigurator.state(),
            "policy": self.policy.state(),
            "guard": self.guard.state(),
            **between,
        }

    def tracked(self) -> DependencyTracker | None:
        """Return a context for instructions that compute what is sent, as long as a boundary needs it."""
        ends = (end for (kind, _), end in self.stage.senders.items() if kind is Instruction.SEND_ACTIVATION)
        is_open = any(end.channel.boundary.dependence is None for end in ends)
        return self.tracking if is_open else None

    def mark_received(self, tensors: Sequence[Tensor], boundary: Boundary) -> None:
        """Mark those of a forward message that depend on parameters, while instructions are tracked."""
        if self.lookahead.tracking and self.tracking and boundary.dependence:
            self.tracking.mark_received(tensors, boundary.dependence)

    def post_receives(self, training: bool) -> None:
        """Let messages be received ahead whose shapes are known from the batch before."""
        engine, stage = self.engine, self.stage
        if stage.before is not None:
            stage.post_receives(Instruction.RECV_ACTIVATION, tensors_in(engine.pipe_recv_buf))
        if stage.after is not None and training and engine.grad_layer is not None:
            stage.post_receives(Instruction.RECV_GRAD, self._gradients_received())

    def send(self, instruction: Instruction, buffer_id: int, run: "functools.partial[None]") -> None:
        """Run a send instruction of the engine: what it sends leaves as packets, or is left to DeepSpeed.

        Raises:
            CompressionError: a message is not like the one announced.
        """
        engine, stage, p2p = self.engine, self.stage, self.stage.p2p
        if not stage.in_schedule:
            stage.enter_unscheduled(self.step_context())
        end = stage.senders[instruction, 0]
        before, forward = end.messages, instruction is Instruction.SEND_ACTIVATION
        gradients: Specs | None = None
        if not forward:
            inputs = engine.pipe_buffers["inputs"][buffer_id]
            if engine.is_grad_partitioned:
                gradients = ()  # they are not known
            elif isinstance(inputs, Tensor):
                gradients = (inputs,)
            else:
                gradients = [tensor for tensor in tensors_in(inputs) or () if tensor.is_floating_point()]
        sending = Sending(
            stage=engine.next_stage if forward else engine.prev_stage,
            channel=end.channel,
            announced=functools.partial(stage.announced.get, end.channel.boundary.number),
            gradients=gradients,
            dispatch=functools.partial(stage.dispatch, instruction, buffer_id),
            original=p2p.original,
            is_one_message=forward and is_deepspeeds(run.func),
        )
        # an instruction may call another one, the engine's of the same name for example
        around, p2p.sending = p2p.sending, sending
        try:
            run()
            if sending.message:
                sending.finish()
        finally:
            p2p.sending = around
        if end.messages == before:
            self._note_left_alone(end.channel, sending)

    def receive(
        self, instruction: Instruction, buffer_id: int, run: "functools.partial[None]", copies: bool
    ) -> None:
        """Run a receive instruction of the engine; `copies`: see `Receiving`.

        Raises:
            CompressionError: gradients of another shape than that of the outputs would be received.
        """
        engine, stage, p2p = self.engine, self.stage, self.stage.p2p
        if not stage.in_schedule:
            stage.enter_unscheduled(self.step_context())
        end = stage.receivers[instruction, 0]
        before, forward = end.messages, instruction is Instruction.RECV_ACTIVATION
        if not forward and is_deepspeeds(run.func):
            self._check_gradients(buffer_id, end.channel.boundary)
        receiving = Receiving(
            stage=engine.prev_stage if forward else engine.next_stage,
            announced=functools.partial(stage.announced.get, end.channel.boundary.number),
            gradients=None if forward else self._gradients_received,
            fetch=functools.partial(stage.fetch, instruction, buffer_id),
            original=p2p.original,
            copies=copies,
        )
        around, p2p.receiving = p2p.receiving, receiving
        try:
            run()
        finally:
            p2p.receiving = around
        if end.messages == before:
            stage.unused.add(instruction)
        else:
            stage.unused.discard(instruction)
        if forward and self.lookahead.tracking:
            self.mark_received(as_list(engine.pipe_buffers["inputs"][buffer_id]), end.channel.boundary)

    def _note_left_alone(self, channel: Channel, sending: Sending) -> None:
        """Warn once that a send instruction sent no message; raise where compression is required."""
        stage, number, forward = self.stage, channel.boundary.number, sending.gradients is None
        why = stage.left_because.get(number, "its tensors are not announced")
        if number in stage.announced:
            why = "its instruction sends no tensor through deepspeed.runtime.pipe.p2p"
        # a boundary that is left to DeepSpeed is reported by the sender of activations
        if forward or (sending.gradients and number in stage.announced):
            self.config.refuse_if_required(f"{channel.place}: {why}")
            self._left_alone.log(f"{channel.place}: left to DeepSpeed, uncompressed: {why}")

    def _gradients_received(self) -> Specs:
        """Return tensors like the gradients that are received next, in the shapes that their sender knows."""
        layer = self.engine.grad_layer
        found = (layer,) if torch.is_tensor(layer) else tensors_in(layer)
        number = self.boundary_of_shapes(sends=True).number
        announced = [spec for spec in self.stage.announced.get(number, ()) if spec.dtype.is_floating_point]
        if found is None or (len(found) == len(announced) and all(map(is_alike, found, announced))):
            return announced
        return found

    def _check_gradients(self, buffer_id: int, boundary: Boundary) -> None:
        """Refuse gradients that autograd would: DeepSpeed receives all in the shapes of the first ones."""
        engine, layer = self.engine, self.engine.grad_layer
        if layer is None or engine.dynamic_shape or engine.is_pipe_partitioned:
            return
        outputs = as_list(engine.pipe_buffers["outputs"][buffer_id])
        floats = [tensor for tensor in outputs if tensor.is_floating_point()]
        gradients = as_list(layer)
        for number, (output, gradient) in enumerate(zip(floats, gradients)):
            if output.shape != gradient.shape:
                refuse(boundary.forward, number, output, gradients)

    def may_leave_early(self, send: type) -> bool:
        """Return whether the send instruction of class `send` does nothing but send its message. Another one
        than DeepSpeed's own may wait for what its neighbour does later."""
        boundary = self.stage.after if send is schedule.SendActivation else self.stage.before
        is_left = boundary is not None and boundary.number in self.stage.left_because
        is_ours = instruction_map(self.engine)[send] is self.engine._AROUND[send]
        return not is_left and is_ours and is_deepspeeds(self.original[send])

    @contextmanager
    def _looking_ahead(self, pipe_schedule: Any) -> Iterator[dict[Instruction, int]]:
        """Track the instructions of a schedule; yield how many receives to post early."""
        engine = self.engine
        tracked = self.tracked if self.tracked() else None
        in_place = [send for send in MADE_BY if not self.may_leave_early(send)]
        lookahead = self.lookahead = Lookahead(pipe_schedule, tracked, self.depth.now, in_place)
        if lookahead.plain:
            pipe_schedule.steps = lookahead.steps
        try:
            ahead = self.is_eager and lookahead.receives_ahead(engine.device) and not engine.dynamic_shape
            yield {key: lookahead.counts[kind] for key, kind in RECEIVED.items()} if ahead else {}
        finally:
            self.lookahead = Lookahead()
            if lookahead.plain:
                del pipe_schedule.steps

    def _link(self, pipe_schedule: Any) -> str:
        """Return what the start-up line calls the link, by what it did in the schedule in progress."""
        if not self.is_eager:
            return self.own_link or "blocking"
        depth = self.depth.describe(self.engine, pipe_schedule)
        if self.engine.dynamic_shape and not self.stage.shape_links:
            return f"eager{depth}, activations in DeepSpeed's order because of dynamic_shape"
        order = "" if self.lookahead.left else ", but every message in the order of the schedule"
        return f"eager{depth}{order}"

    def _put_in_force(self, change: Change | None) -> None:
        if change is not None:
            differs = bool(change.boundaries) and self.reconfigure(change.boundaries)
            if self.engine.global_rank == 0:
                change.report(differs)

    def _start_policy(self) -> None:
        first = self.policy.start(self.engine, self.stage)
        if first:
            self.reconfigure(first)
        if self.replica_policy is not None:
            self.replica_policy.start(self.engine.global_steps)
