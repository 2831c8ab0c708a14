"""The mixin that goes over a live `PipelineEngine`; `attach` puts it there.

Nothing of DeepSpeed is copied: each of the four instructions that move tensors runs DeepSpeed's own code
inside a context of `Stage`. `_exec_schedule` takes functions from the class's `_INSTRUCTION_MAP`, not methods
by name, so the mixin brings its own map, a ChainMap over the engine's: entries that others patch later stay
in force.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule

from ds_compress.checkpoint.mixin import CheckpointedEngine
from ds_compress.engine.evaluation import EvaluatedEngine
from ds_compress.engine.intercept import receiving
from ds_compress.engine.lookahead import Lookahead
from ds_compress.engine.reconfigure import Reconfigurator
from ds_compress.engine.stage import Instruction, Stage, StepContext
from ds_compress.engine.wiring import wire
from ds_compress.message.carrying import Tracking
from ds_compress.message.channel import Boundary
from ds_compress.message.layout import as_list
from ds_compress.monitor.monitor import Monitor
from ds_compress.runtime.depth import DepthController
from ds_compress.runtime.guard import Guard
from ds_compress.runtime.policy import PolicyController
from ds_compress.runtime.replica_check import ReplicaCheck

RECEIVED = {
    Instruction.RECV_ACTIVATION: schedule.RecvActivation,
    Instruction.RECV_GRAD: schedule.RecvGrad,
}
_TENSORS = {
    Instruction.RECV_ACTIVATION: operator.attrgetter("pipe_recv_buf"),
    Instruction.RECV_GRAD: operator.attrgetter("grad_layer"),
}
"""Of an engine, those that a receive instruction fills."""

_UNTIMED = contextlib.nullcontext()


def steps_per_epoch(engine: Any) -> int | None:
    """Training steps in one pass over the data that DeepSpeed was given; None if it was given none of a known
    size."""
    try:
        return -(-len(engine.training_data) // engine.train_batch_size())
    except TypeError:
        return None


class CompressedEngine(EvaluatedEngine, CheckpointedEngine):
    """Runs DeepSpeed's pipeline with every stage message in one packet.

    Mixed in before the engine's own class, so `isinstance(engine, PipelineEngine)` and every override keep
    working.
    """

    _compression: Stage
    _compression_monitor: Monitor
    _ahead: DepthController
    _is_eager = False  # whether messages may leave when they are computed
    _compression_mirrors: ReplicaCheck
    _guard: Guard
    _adoption: Reconfigurator
    _rungs: PolicyController
    _own_link: ClassVar[str | None] = None  # where link.mode has no say: the name of what has
    _lookahead: Lookahead  # of the schedule in progress, or of none
    _tracking: Tracking | None = None  # as long as some message may have to know which of its tensors carry

    _AROUND: ClassVar[dict[type, str]] = {
        schedule.ForwardPass: "_forward_pass",
        schedule.BackwardPass: "_backward_pass",
        schedule.SendActivation: "_send_activations",
        schedule.RecvActivation: "_recv_activations",
        schedule.SendGrad: "_send_grads",
        schedule.RecvGrad: "_recv_grads",
    }
    """By instruction, the method that runs in the place of its function, which `_stock` has."""

    _stock: ClassVar[Mapping[type, Callable[..., None]]]

    def _connect(self, config, p2p):
        """Build the boundaries and links of this rank."""
        number, replica = self.stage_id, self.grid.get_data_parallel_id()
        before = Boundary(number - 1, config, replica) if number > 0 else None
        after = Boundary(number, config, replica) if number < self.num_stages - 1 else None
        self._compression = Stage(config, p2p, before, after)
        self._lookahead = Lookahead()
        self._is_eager = config.block.link.mode == "eager"
        self._track(config)
        wire(self._compression, self)

    @staticmethod
    def _check(config, stages):
        """Refuse what this kind of engine cannot do, with pipelines of so many ranks; returns their
        boundaries."""
        config.check_boundaries(stages - 1)
        return stages - 1

    def _track(self, config):
        """Find out what carries, if a codec with a loss may meet several float tensors in a message."""
        used = {channel.codec.name for b in self._compression.boundaries for channel in b.channels}
        lossy = config.changes or config.quality is not None or used - {"none"}
        self._tracking = Tracking(self.module) if lossy and config.block.tensors == "large" else None

    def _exec_schedule(self, pipe_schedule):
        asked, pipe_schedule = pipe_schedule, self._ahead.schedule(self, pipe_schedule)
        context, stage, monitor = self._step_context(), self._compression, self._compression_monitor
        training = context.training
        if training:
            self._recount_warmup(stage.config)
            self._rungs.begin(self)
            step, watched = self.global_steps + 1, self.monitor.enabled
            monitor.begin_step(stage.ends, step, self.micro_batches, watched, self._guard.judges(step))
        with self._looking_ahead(pipe_schedule, training) as counts:
            measured = self._ahead.batch(self, stage, asked) if training else contextlib.nullcontext()
            with measured, stage.running(context, counts):
                self._post_receives(training)
                super()._exec_schedule(pipe_schedule)
            monitor.link = self._link(pipe_schedule)
        if training:
            for boundary in stage.boundaries:
                stage.in_lane(boundary, partial(boundary.end_step, self._replica_mean))
            self._compression_mirrors.after(self.global_steps)
            monitor.end_step(stage.ends, self.global_steps, self.global_samples, self.monitor)
            self._ahead.after(self, stage)
            self._rungs.after(self)

    @contextlib.contextmanager
    def _looking_ahead(self, pipe_schedule, training):
        """Follow the schedule's instructions inside; gives how many messages are to be received ahead."""
        tracked = self._tracked if self._tracked() else None
        lookahead = self._lookahead = Lookahead(pipe_schedule, tracked, self._ahead.now)
        if lookahead.plain:
            pipe_schedule.steps = lookahead.steps
        try:
            ahead = self._is_eager and lookahead.receives_ahead(self.device) and not self.dynamic_shape
            yield {key: lookahead.counts[kind] for key, kind in RECEIVED.items()} if ahead else {}
        finally:
            self._lookahead = Lookahead()
            if lookahead.plain:
                del pipe_schedule.steps

    def _tracked(self):
        """A context for instructions that compute what is sent."""
        undecided = self._tracking is not None and any(b.carrying is None for b in self._boundaries_after())
        return self._tracking if undecided else None

    def _boundaries_after(self):
        """Those that this rank sends activations over."""
        return [self._compression.after] if self._compression.after else []

    def _link(self, pipe_schedule):
        """What the start-up line calls the link, by what it did in the schedule in progress."""
        if self._own_link or not self._is_eager:
            return self._own_link or "blocking"
        depth = self._ahead.in_words(self, pipe_schedule)
        if self.dynamic_shape and not self._compression.shape_links:
            return f"eager{depth}, activations in DeepSpeed's order because of dynamic_shape"
        order = "" if self._lookahead.left else ", but every message in the order of the schedule"
        return f"eager{depth}{order}"

    def _loss_scale(self):
        """What gradients are multiplied by at present: the same on all stages, as all skip the same steps."""
        optimizer = self.optimizer  # None while it is not configured yet: evaluation does not need it
        return float(optimizer.loss_scale) if self.fp16_enabled() and optimizer else 1.0

    def _recount_warmup(self, config):
        steps = steps_per_epoch(self) if config.block.warmup_epochs else None
        if steps:
            config.count_epochs(steps, self.global_steps)

    def _post_receives(self, training):
        """Let messages be received ahead whose shapes are known from the batch before."""
        stage = self._compression
        if stage.before is not None and self.pipe_recv_buf is not None:
            stage.post_receives(Instruction.RECV_ACTIVATION, as_list(self.pipe_recv_buf))
        if stage.after is not None and training and self.grad_layer is not None:
            stage.post_receives(Instruction.RECV_GRAD, as_list(self.grad_layer))

    def _replica_mean(self, tensor):
        if self.is_data_parallel:
            dist.all_reduce(tensor, group=self.grid.get_data_parallel_group())
            tensor = tensor / self.grid.data_parallel_size
        return tensor

    def _next_batch(self):
        batch = super()._next_batch()
        if self._compression.wants_samples:
            loading = self._lookahead.current
            self._compression.load(batch, loading.kwargs.get("buffer_id") if loading else None)
        return batch

    def _forward_pass(self, buffer_id, *args, **kwargs):
        measuring = self._ahead.measuring
        with measuring.timed("forward", buffer_id) if measuring else _UNTIMED:
            self._stock[schedule.ForwardPass](self, buffer_id, *args, **kwargs)
        # A shape message that goes DeepSpeed's way goes first, in its own order
        shapes_known = bool(self._compression.shape_links) or not (
            self.dynamic_shape or self.first_output_send
        )
        if self._is_eager and shapes_known and self._lookahead.leaves_early(schedule.ForwardPass, buffer_id):
            self._INSTRUCTION_MAP[schedule.SendActivation](self, buffer_id)

    def _backward_pass(self, buffer_id, *args, **kwargs):
        measuring = self._ahead.measuring
        with measuring.timed("backward", buffer_id) if measuring else _UNTIMED:
            self._stock[schedule.BackwardPass](self, buffer_id, *args, **kwargs)
        if self._is_eager and self._lookahead.leaves_early(schedule.BackwardPass, buffer_id):
            self._INSTRUCTION_MAP[schedule.SendGrad](self, buffer_id)

    def _send_activations(self, buffer_id, *args, **kwargs):
        if self._lookahead.at[0] not in self._lookahead.left:
            run = partial(self._stock[schedule.SendActivation], self, buffer_id, *args, **kwargs)
            self._send(Instruction.SEND_ACTIVATION, buffer_id, run)

    def _send_grads(self, buffer_id, *args, **kwargs):
        if self._lookahead.at[0] not in self._lookahead.left:
            run = partial(self._stock[schedule.SendGrad], self, buffer_id, *args, **kwargs)
            self._send(Instruction.SEND_GRAD, buffer_id, run)

    def _recv_activations(self, buffer_id, *args, **kwargs):
        run = partial(self._stock[schedule.RecvActivation], self, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_ACTIVATION, buffer_id, run)

    def _recv_grads(self, buffer_id, *args, **kwargs):
        run = partial(self._stock[schedule.RecvGrad], self, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_GRAD, buffer_id, run)

    def _send(self, instruction, buffer_id, run):
        if not self._compression.in_schedule:
            self._compression.enter_unscheduled(self._step_context())
        self._compression.send(instruction, buffer_id, run)

    def _receive(self, instruction, buffer_id, run):
        stage, forward = self._compression, instruction is Instruction.RECV_ACTIVATION
        if not stage.in_schedule:
            stage.enter_unscheduled(self._step_context())
        stage.receive(instruction, buffer_id, run, partial(_TENSORS[instruction], self))
        if forward and self._lookahead.tracking and stage.before.carrying:
            self._tracking.add_float(as_list(self.pipe_buffers["inputs"][buffer_id]), stage.before.carrying)

    def _step_context(self):
        """What messages from now on belong to."""
        training = torch.is_grad_enabled() and self.module.training
        masked = self.has_attention_mask or self.has_bool_tensors
        return StepContext(self.global_steps, training, self._loss_scale(), int(masked))

    # Some projects call these directly instead of through a schedule

    def _exec_send_activations(self, buffer_id, *args, **kwargs):
        run = partial(super()._exec_send_activations, buffer_id, *args, **kwargs)
        self._send(Instruction.SEND_ACTIVATION, buffer_id, run)

    def _exec_send_grads(self, buffer_id, *args, **kwargs):
        run = partial(super()._exec_send_grads, buffer_id, *args, **kwargs)
        self._send(Instruction.SEND_GRAD, buffer_id, run)

    def _exec_recv_activations(self, buffer_id, *args, **kwargs):
        run = partial(super()._exec_recv_activations, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_ACTIVATION, buffer_id, run)

    def _exec_recv_grads(self, buffer_id, *args, **kwargs):
        run = partial(super()._exec_recv_grads, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_GRAD, buffer_id, run)

    def _send_tensor_meta(self, buffer, *args, **kwargs):
        tensors, boundary = as_list(buffer), self._boundary_of_shapes(sends=True)
        carrying = self._tracking.of(tensors, boundary.carrying) if self._tracking is not None else None
        written = 2 + sum(2 + tensor.dim() for tensor in tensors)
        message = self._compression.shape_message(carrying, written)
        with self._compression.shape_messages(message):
            super()._send_tensor_meta(buffer, *args, **kwargs)
        boundary.carrying = message.carrying

    def _recv_tensor_meta(self, *args, **kwargs):
        message = self._compression.shape_message()
        with self._compression.shape_messages(message):
            buffers = super()._recv_tensor_meta(*args, **kwargs)
        floats = sum(tensor.dtype.is_floating_point for tensor in as_list(buffers))
        self._boundary_of_shapes(sends=False).carrying = message.received(floats)
        return receiving(buffers)

    def _boundary_of_shapes(self, sends):
        """Whose shapes DeepSpeed sends, or receives, at present."""
        return self._compression.after if sends else self._compression.before

    def _allocate_or_extend_buffers(self, idx, shape, dtype):
        """A buffer of its own for every message.

        DeepSpeed shares one per tensor position between activations and gradients and ignores the dtype on
        reuse, so a receive of mixed tuples under dynamic_shape could land in a buffer of the wrong size.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)
