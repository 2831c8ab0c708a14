"""The mixin that goes over a live `PipelineEngine`; `attach` puts it there.

Nothing of DeepSpeed is copied: each of the four instructions that move tensors runs DeepSpeed's own code
inside a context of `Stage`. `_exec_schedule` takes functions from the class's `_INSTRUCTION_MAP`, not methods
by name, so the mixin brings its own map, a ChainMap over the engine's: entries that others patch later stay
in force.
"""

import functools
from typing import Any, ClassVar

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule

from ds_compress.checkpoint.mixin import CheckpointedEngine
from ds_compress.config import DIRECTIONS
from ds_compress.message.channel import Boundary
from ds_compress.monitor.monitor import Monitor
from ds_compress.pipeline.stage import Stage
from ds_compress.transport.p2p import (
    EagerReceiver,
    EagerSender,
    PeerTimeout,
    Receiver,
    Sender,
    channel_groups,
)
from ds_compress.transport.streams import Lane, lane_for


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def steps_per_epoch(engine: Any) -> int | None:
    """Training steps in one pass over the data that DeepSpeed was given; None if it was given none of a known
    size."""
    try:
        return -(-len(engine.training_data) // engine.train_batch_size())
    except TypeError:
        return None


class CompressedEngine(CheckpointedEngine):
    """Runs DeepSpeed's pipeline with every stage message in one packet.

    Mixed in before the engine's own class, so `isinstance(engine, PipelineEngine)` and every override keep
    working.
    """

    _compression: Stage
    _compression_monitor: Monitor
    _own_link: ClassVar[str | None] = None  # where link.mode has no say: the name of what has
    _ahead = False  # whether the schedule in progress sends when computed
    _sent_ahead: set[tuple[type, int]]  # instructions, with buffer, whose message has left already

    _AROUND: ClassVar[dict[type, str]] = {
        schedule.ForwardPass: "_forward_pass",
        schedule.BackwardPass: "_backward_pass",
        schedule.SendActivation: "_send_activations",
        schedule.RecvActivation: "_recv_activations",
        schedule.SendGrad: "_send_grads",
        schedule.RecvGrad: "_recv_grads",
    }
    """By instruction, the method that gets its function to run."""

    def _connect(self, config, p2p):
        """Build the boundaries and links of this rank."""
        number, replica = self.stage_id, self.grid.get_data_parallel_id()
        before = Boundary(number - 1, config, replica) if number > 0 else None
        after = Boundary(number, config, replica) if number < self.num_stages - 1 else None
        stage = self._compression = Stage(config, p2p, before, after)
        self._sent_ahead = set()
        eager = config.block.link.mode == "eager"
        rests = [f"{direction} rest" for direction in DIRECTIONS if config.has_rest(direction)]
        pipelines = self.grid._topo.get_axis_comm_lists("pipe")
        seconds = config.block.link.timeout_s
        groups = channel_groups(pipelines, self.global_rank, [*DIRECTIONS, *rests], seconds) if eager else {}
        stage.groups = list(groups.values())
        send, receive = (EagerSender, EagerReceiver) if eager else (Sender, Receiver)

        def connect(instruction, channel, kind, neighbour, lane):
            peer = self.grid.stage_to_global(neighbour)
            group = groups.get((channel.boundary.number, channel.direction))
            rest_group = groups.get((channel.boundary.number, f"{channel.direction} rest"))
            patience = PeerTimeout(channel.place, seconds)
            stage.connect(
                instruction,
                channel,
                kind(peer, self.device, group, patience),
                kind(peer, self.device, rest_group, patience),
                lane,
            )

        if before:
            lane = lane_for(self.device) if eager else Lane()
            connect("RecvActivation", before.forward, receive, self.prev_stage, lane)
            connect("SendGrad", before.backward, send, self.prev_stage, lane)
        if after:
            lane = lane_for(self.device) if eager else Lane()
            connect("SendActivation", after.forward, send, self.next_stage, lane)
            connect("RecvGrad", after.backward, receive, self.next_stage, lane)

    @staticmethod
    def _check(config, stages):
        """Refuse what this kind of engine cannot do, with pipelines of so many ranks; returns their
        boundaries."""
        config.check_boundaries(stages - 1)
        return stages - 1

    def _exec_schedule(self, pipe_schedule):
        training = torch.is_grad_enabled() and self.module.training
        stage = self._compression
        if training:
            self._recount_warmup(stage.config)
            self._compression_monitor.begin_step(
                stage.ends, self.global_steps + 1, self.micro_batches, self.monitor.enabled
            )
        with stage.running(self.global_steps, training, self._loss_scale()):
            self._look_ahead(pipe_schedule, training)
            super()._exec_schedule(pipe_schedule)
        self._ahead = False
        if training:
            for boundary in stage.boundaries:
                stage.in_lane(boundary, functools.partial(boundary.end_step, self._replica_mean))
            self._compression_monitor.end_step(
                stage.ends, self.global_steps, self.global_samples, self.monitor
            )

    def _look_ahead(self, pipe_schedule, training):
        """Post receives ahead, and let messages leave when computed, if the link is to.

        Not before the shapes are known: DeepSpeed's shape message goes first, in its own order.
        """
        self._sent_ahead.clear()
        eager = self._compression.config.block.link.mode == "eager"
        self._ahead = eager and not self.dynamic_shape and self._shapes_known(training)
        if self._ahead:
            self._expect_messages(pipe_schedule.micro_batches, training)

    def _loss_scale(self):
        """What gradients are multiplied by at present: the same on all stages, as all skip the same steps."""
        optimizer = self.optimizer  # None while it is not configured yet: evaluation does not need it
        return float(optimizer.loss_scale) if self.fp16_enabled() and optimizer else 1.0

    def _recount_warmup(self, config):
        steps = steps_per_epoch(self) if config.block.warmup_epochs else None
        if steps:
            config.count_epochs(steps, self.global_steps)

    def _shapes_known(self, training):
        stage = self._compression
        sends_known = stage.after is None or not self.first_output_send
        receives_known = stage.before is None or self.pipe_recv_buf is not None
        gradients_known = stage.after is None or not training or self.grad_layer is not None
        return sends_known and receives_known and gradients_known

    def _expect_messages(self, micro_batches, training):
        stage = self._compression
        if stage.before is not None:
            stage.expect("RecvActivation", _as_list(self.pipe_recv_buf), micro_batches, self._raw_tail())
        if stage.after is not None and training:
            stage.expect("RecvGrad", _as_list(self.grad_layer), micro_batches)

    def _raw_tail(self):
        """DeepSpeed sends a bool mask in last place, as half precision: it is float but must not be
        compressed."""
        return int(self.has_attention_mask or self.has_bool_tensors)

    def _replica_mean(self, tensor):
        if self.is_data_parallel:
            dist.all_reduce(tensor, group=self.grid.get_data_parallel_group())
            tensor = tensor / self.grid.data_parallel_size
        return tensor

    def _next_batch(self):
        batch = super()._next_batch()
        self._compression.load(batch)
        return batch

    def _forward_pass(self, run, buffer_id):
        run(buffer_id)
        self._send_ahead(schedule.SendActivation, self._compression.after, buffer_id)

    def _backward_pass(self, run, buffer_id):
        run(buffer_id)
        self._send_ahead(schedule.SendGrad, self._compression.before, buffer_id)

    def _send_ahead(self, instruction, boundary, buffer_id):
        if self._ahead and boundary is not None:
            self._INSTRUCTION_MAP[instruction](self, buffer_id)
            self._sent_ahead.add((instruction, buffer_id))

    def _already_sent(self, instruction, buffer_id):
        sent = (instruction, buffer_id) in self._sent_ahead
        self._sent_ahead.discard((instruction, buffer_id))
        return sent

    def _send_activations(self, run, buffer_id):
        if not self._already_sent(schedule.SendActivation, buffer_id):
            with self._compression.send("SendActivation", self._raw_tail()):
                run(buffer_id)

    def _send_grads(self, run, buffer_id):
        if not self._already_sent(schedule.SendGrad, buffer_id):
            with self._compression.send("SendGrad"):
                run(buffer_id)

    def _recv_activations(self, run, buffer_id):
        with self._compression.receive(
            "RecvActivation", lambda: _as_list(self.pipe_recv_buf), self._raw_tail()
        ):
            run(buffer_id)

    def _recv_grads(self, run, buffer_id):
        with self._compression.receive("RecvGrad", lambda: _as_list(self.grad_layer)):
            run(buffer_id)

    # Some projects call these directly instead of through a schedule

    def _exec_send_activations(self, *args, **kwargs):
        self._send_activations(super()._exec_send_activations, *args, **kwargs)

    def _exec_send_grads(self, *args, **kwargs):
        self._send_grads(super()._exec_send_grads, *args, **kwargs)

    def _exec_recv_activations(self, *args, **kwargs):
        self._recv_activations(super()._exec_recv_activations, *args, **kwargs)

    def _exec_recv_grads(self, *args, **kwargs):
        self._recv_grads(super()._exec_recv_grads, *args, **kwargs)

    def _send_tensor_meta(self, *args, **kwargs):
        with self._compression.aside():
            super()._send_tensor_meta(*args, **kwargs)

    def _recv_tensor_meta(self, *args, **kwargs):
        with self._compression.aside():
            return super()._recv_tensor_meta(*args, **kwargs)

    def _allocate_or_extend_buffers(self, idx, shape, dtype):
        """A buffer of its own for every message.

        DeepSpeed shares one per tensor position between activations and gradients and ignores the dtype on
        reuse, so a receive of mixed tuples under dynamic_shape could land in a buffer of the wrong size.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)
