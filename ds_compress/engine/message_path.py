"""The path of a message: DeepSpeed's instructions send and receive through it, one packet a message."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule

from ds_compress.checkpoint.restore import Side
from ds_compress.config import Config
from ds_compress.engine import announced_tensors
from ds_compress.engine.deepspeed import (
    PipelineEngine,
    instruction_map,
    is_deepspeeds,
    layer_range,
    loss_scale,
)
from ds_compress.engine.intercept import PointToPoint, Receiving, Sending
from ds_compress.engine.left_alone import LeftAlone
from ds_compress.engine.lookahead import ORDERED, Lookahead
from ds_compress.engine.stage import Stage, StepContext
from ds_compress.engine.tracked_passes import TrackedPasses
from ds_compress.engine.wiring import describe_eager, wire
from ds_compress.message.channel import Boundary
from ds_compress.message.layout import as_list, tensors_in
from ds_compress.transport.staging import receives_hold_device


class MessagePath:
    """Sends and receives what the instructions of one rank do, posts receives, and looks ahead."""

    own_link: ClassVar[str | None] = None
    """Name of the link of an engine that has its own; None: `link.mode` decides."""

    def __init__(
        self,
        engine: PipelineEngine,
        config: Config,
        p2p: PointToPoint,
        original: Mapping[type, Callable[..., None]],
        left_alone: LeftAlone,
        depth: int,
    ):
        """Build the boundaries and links of this rank; every rank of the job calls it.

        Args:
            engine: DeepSpeed's, already of a class with the mixin.
            config: prepared.
            p2p: stands in for DeepSpeed's point-to-point module.
            original: DeepSpeed's functions, by instruction.
            left_alone: takes note of messages that are left to DeepSpeed.
            depth: of the schedules at first.
        """
        self.engine = engine
        self.config = config
        self.original = original
        self._left_alone = left_alone
        self.lookahead = Lookahead()  # of the schedule in progress, or of none
        self.in_train_batch = False  # whether `train_batch` runs: training, whatever mode the module is in
        self.is_eager = config.block.link.mode == "eager" and self.own_link is None
        self.stage = self.connect(p2p, depth)
        self.tracked = TrackedPasses(engine, config, self.stage)

    @staticmethod
    def check(config: Config, stages: int) -> int:
        """Check that the engine supports `config`; return the boundaries of a pipeline of `stages` ranks.

        Raises:
            CompressionError: the engine does not support a setting.
        """
        config.in_force.check_boundaries(stages - 1)
        return stages - 1

    def connect(self, p2p: PointToPoint, depth: int) -> Stage:
        """Return this rank's stage, connected with its neighbours by links for schedules of `depth`."""
        engine, config = self.engine, self.config
        number, replica = engine.stage_id, engine.grid.get_data_parallel_id()
        before = Boundary(number - 1, config, replica) if number > 0 else None
        after = Boundary(number, config, replica) if number < engine.num_stages - 1 else None
        stage = Stage(config, p2p, before, after)
        wire(stage, engine, depth)
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
        # one that overrides `train()`, to train without dropout for example, may be in evaluation mode
        training = torch.is_grad_enabled() and (self.in_train_batch or engine.module.training)
        masked = engine.has_attention_mask or engine.has_bool_tensors
        return StepContext(engine.global_steps, training, loss_scale(engine), int(masked))

    def post_receives(self, training: bool) -> None:
        """Let messages be received ahead whose shapes are known from the batch before."""
        engine, stage = self.engine, self.stage
        if training or not engine.is_last_stage():
            self.post_activations()
        if stage.after is not None and training and engine.grad_layer is not None:
            found = announced_tensors.gradients_received(engine, stage.announced, stage.after)
            stage.post_receives(schedule.RecvGrad, found)

    def post_activations(self) -> None:
        """Let activations be received ahead; in evaluation the last stage waits until it has loaded data. If
        data have run out, no packet comes, and the receive would be left for those of the next batch."""
        if self.stage.before is not None:
            self.stage.post_receives(schedule.RecvActivation, tensors_in(self.engine.pipe_recv_buf))

    def send(self, instruction: type, buffer_id: int, run: "functools.partial[None]") -> None:
        """Run a send instruction of the engine: what it sends leaves as packets, or is left to DeepSpeed.

        Raises:
            CompressionError: a message is not like the one announced.
        """
        engine, stage, p2p = self.engine, self.stage, self.stage.p2p
        if not stage.in_schedule:
            stage.enter_unscheduled(self.step_context())
        end = stage.senders[instruction, 0]
        before, forward = end.messages, instruction is schedule.SendActivation
        gradients = () if forward else announced_tensors.gradients_sent(engine, buffer_id)
        sending = Sending(
            stage=engine.next_stage if forward else engine.prev_stage,
            channel=end.channel,
            expected=functools.partial(
                announced_tensors.next_message, stage.announced, end.channel, lambda: gradients
            ),
            dispatch=functools.partial(stage.dispatch, instruction, buffer_id),
            is_one_message=forward and is_deepspeeds(run.func),
        )
        # an instruction may call another one, the engine's of the same name for example
        around, p2p.sending = p2p.sending, sending
        try:
            run()
            if sending.message:
                p2p.finish(sending)
        finally:
            p2p.sending = around
        if end.messages == before:
            self._left_alone.note(stage, end.channel, gradients)

    def receive(self, instruction: type, buffer_id: int, run: "functools.partial[None]") -> None:
        """Run a receive instruction of the engine.

        Raises:
            CompressionError: gradients of another shape than that of the outputs would be received.
        """
        engine, stage, p2p = self.engine, self.stage, self.stage.p2p
        if not stage.in_schedule:
            stage.enter_unscheduled(self.step_context())
        end = stage.receivers[instruction, 0]
        before, forward = end.messages, instruction is schedule.RecvActivation
        is_own = is_deepspeeds(run.func)
        if not forward and is_own:
            announced_tensors.check_gradients(engine, buffer_id, end.channel.boundary)
        gradients = functools.partial(
            announced_tensors.gradients_received, engine, stage.announced, end.channel.boundary
        )
        receiving = Receiving(
            stage=engine.prev_stage if forward else engine.next_stage,
            expected=functools.partial(
                announced_tensors.next_message, stage.announced, end.channel, gradients
            ),
            fetch=functools.partial(stage.fetch, instruction, buffer_id),
            copies=not is_own,
        )
        around, p2p.receiving = p2p.receiving, receiving
        try:
            run()
        finally:
            p2p.receiving = around
        end.is_used = end.messages > before
        if forward and self.lookahead.tracking:
            tensors = as_list(engine.pipe_buffers["inputs"][buffer_id])
            self.tracked.mark_received(tensors, end.channel.boundary)

    def may_leave_early(self, send: type) -> bool:
        """Return whether the send instruction of class `send` does nothing but send a packet. Another one
        than DeepSpeed's own, or a message that is left to DeepSpeed, may wait for what its neighbour does
        later."""
        boundary = self.stage.after if send is schedule.SendActivation else self.stage.before
        is_left = boundary is not None and boundary.number in self.stage.left_because
        is_ours = instruction_map(self.engine)[send] is self.engine._AROUND[send]
        return not is_left and is_ours and is_deepspeeds(self.original[send])

    @contextmanager
    def looking_ahead(self, pipe_schedule: Any, depth: int, in_order: bool) -> Iterator[Mapping[type, int]]:
        """Run the steps of a schedule of `depth` through a `Lookahead`; yield how many receives to post
        early.

        Args:
            in_order: send and receive nothing ahead.
        """
        engine = self.engine
        lookahead = self.lookahead = Lookahead(pipe_schedule, self.tracked.begin_schedule(), depth, in_order)
        if lookahead.plain:
            pipe_schedule.steps = lookahead.steps
        try:
            may_post = type(pipe_schedule) in ORDERED or not receives_hold_device(engine.device)
            ahead = self.is_eager and lookahead.plain and may_post and not engine.dynamic_shape
            yield lookahead.counts if ahead and not in_order else {}
        finally:
            self.lookahead = Lookahead()
            lookahead.end()
            if lookahead.plain:
                del pipe_schedule.steps

    def describe_link(self, depth: str) -> str:
        """Return what the start-up line calls the link, by what it did in the schedule in progress.

        Args:
            depth: the part of the line about the depth (`DepthController.describe`).
        """
        if not self.is_eager:
            return self.own_link or "blocking"
        leaves_early = bool(self.lookahead.left) or self.lookahead.has_kept
        return describe_eager(self.stage, depth, self.engine.dynamic_shape, leaves_early)
