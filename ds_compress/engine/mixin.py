"""The mixin for a live `PipelineEngine`, which `attach` adds to its class.

Nothing of DeepSpeed is copied: the four instructions that move tensors run DeepSpeed's own code inside a
context of `Stage`. `_exec_schedule` looks functions up in the class's `_INSTRUCTION_MAP`, so the mixin has a
map of its own: a ChainMap over the engine's, so that later patches of others apply. The only attribute that
ds_compress sets on an engine is its `Session`.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.checkpoint import checkpointer
from ds_compress.engine.deepspeed import PipelineEngine
from ds_compress.engine.evaluation import run_eval_batch
from ds_compress.engine.intercept import ShapeMessage, receiving
from ds_compress.engine.session import Session
from ds_compress.engine.tied_gradients import reduce_tied_gradients
from ds_compress.message.layout import tensors_in

_UNTIMED = contextlib.nullcontext()
SENDS = schedule.SendActivation, schedule.SendGrad
RECEIVES = schedule.RecvActivation, schedule.RecvGrad

_Engine: Any = object
"""What stands behind a mixin: DeepSpeed's engine, which has no types."""


def _around_pass(kind: type, send: type) -> Callable[..., None]:
    """Return what runs instead of DeepSpeed's function for a pass: its message may leave after it."""
    is_forward = kind is schedule.ForwardPass
    name = "forward" if is_forward else "backward"

    def run_pass(engine: PipelineEngine, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        session = engine.ds_compress
        path, profiler = session.path, session.depth.profiler
        with profiler.timed(name, buffer_id) if profiler else _UNTIMED:
            path.original[kind](engine, buffer_id, *args, **kwargs)
        lookahead = path.lookahead
        may_leave = path.is_eager and lookahead.at in lookahead.early and path.may_leave_early(send)
        if may_leave and is_forward:
            # A shape message that goes DeepSpeed's way goes first, in its own order
            in_order = engine.dynamic_shape or engine.first_output_send
            may_leave = bool(path.stage.shape_links) or not in_order
        if may_leave and lookahead.leaves_early(kind, buffer_id):
            path.send(send, buffer_id, partial(path.original[send], engine, buffer_id))
        if not is_forward and session.gradients is not None and session.gradients.early is not None:
            session.gradients.early.end_pass()

    return run_pass


def _around_send(kind: type) -> Callable[..., None]:
    """Return what runs instead of DeepSpeed's function for a send instruction."""

    def run_send(engine: PipelineEngine, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        path = engine.ds_compress.path
        if path.lookahead.at not in path.lookahead.left:
            path.send(kind, buffer_id, partial(path.original[kind], engine, buffer_id, *args, **kwargs))

    return run_send


def _around_receive(kind: type) -> Callable[..., None]:
    """Return what runs instead of DeepSpeed's function for a receive instruction."""

    def run_receive(engine: PipelineEngine, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        path = engine.ds_compress.path
        path.receive(kind, buffer_id, partial(path.original[kind], engine, buffer_id, *args, **kwargs))

    return run_receive


class CompressedEngine(_Engine):
    """Runs DeepSpeed's pipeline with every stage message in one packet.

    Mixed in before the engine's own class, so `isinstance(engine, PipelineEngine)` and every override keep
    working.
    """

    ds_compress: Session

    _AROUND: ClassVar[dict[type, Callable[..., None]]] = {
        schedule.ForwardPass: _around_pass(schedule.ForwardPass, schedule.SendActivation),
        schedule.BackwardPass: _around_pass(schedule.BackwardPass, schedule.SendGrad),
        **{kind: _around_send(kind) for kind in SENDS},
        **{kind: _around_receive(kind) for kind in RECEIVES},
        schedule.ReduceTiedGrads: reduce_tied_gradients,
    }
    """By instruction, what runs instead of DeepSpeed's function; functions, as a subclass of the engine may
    have methods of any name."""

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.batch():
            return super().train_batch(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.watchdog.watch("eval_batch"):
            return run_eval_batch(self, super().eval_batch, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.watchdog.watch("save_checkpoint", sends_messages=False):
            return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.watchdog.watch("load_checkpoint", sends_messages=False):
            return super().load_checkpoint(*args, **kwargs)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        with self.ds_compress.running(pipe_schedule) as chosen:
            super()._exec_schedule(chosen)

    def _next_batch(self) -> Any:
        session, guard = self.ds_compress, self.ds_compress.guard
        batch = super()._next_batch() if guard.replayed is None else next(guard.replayed)
        if not session.stage.training:
            session.path.post_activations()
        if guard.replayed is not None:
            return batch
        loading = session.path.lookahead.current
        session.stage.load(batch, loading.kwargs.get("buffer_id") if loading else None)
        if guard.due and batch is not None:
            guard.batches.append(batch)
        return batch

    def _save_checkpoint(self, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(save_dir, tag, *args, **kwargs)
        checkpointer.save(self.ds_compress, Path(save_dir), str(tag))

    def _save_moe_checkpoint(self, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_moe_checkpoint(save_dir, tag, *args, **kwargs)
        checkpointer.save(self.ds_compress, Path(save_dir), str(tag))

    def _load_checkpoint(self, load_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        path, client_state = super()._load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            restores = not kwargs.get("load_module_only")
            checkpointer.load(self.ds_compress, Path(load_dir), str(tag), restores)
        return path, client_state

    def allreduce_bucket(self, bucket: Any, dp_group: Any, dp_world_size: Any = None) -> Tensor:
        reduce, traffic = super().allreduce_bucket, self.ds_compress.gradients
        if traffic is not None:
            size = dp_world_size or torch.distributed.get_world_size(dp_group)
            factor = 1 / size if self.gradient_average else 1.0
            exact = partial(reduce, dp_group=dp_group, dp_world_size=dp_world_size)
            if traffic.all_reduce_of_engine(bucket, dp_group, factor, exact):
                return self.flatten(bucket)
        return reduce(bucket, dp_group, dp_world_size)

    # Some projects call these directly instead of through a schedule

    def _exec_send_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_send_activations, buffer_id, *args, **kwargs)
        self.ds_compress.path.send(schedule.SendActivation, buffer_id, run)

    def _exec_send_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_send_grads, buffer_id, *args, **kwargs)
        self.ds_compress.path.send(schedule.SendGrad, buffer_id, run)

    def _exec_recv_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_recv_activations, buffer_id, *args, **kwargs)
        self.ds_compress.path.receive(schedule.RecvActivation, buffer_id, run)

    def _exec_recv_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_recv_grads, buffer_id, *args, **kwargs)
        self.ds_compress.path.receive(schedule.RecvGrad, buffer_id, run)

    def _send_tensor_meta(self, buffer: Any, *args: Any, **kwargs: Any) -> None:
        path, stage = self.ds_compress.path, self.ds_compress.stage
        boundary = path.boundary_of_shapes(sends=True)
        tensors = tensors_in(buffer) if stage.is_sending else None
        dependence = written = None
        if tensors is not None:
            dependence = path.tracked.dependence(tensors, boundary)
            written = 2 + sum(2 + tensor.dim() for tensor in tensors)
        message = ShapeMessage(stage.shape_links or stage.p2p.original, dependence, written)
        with stage.p2p.shape_messages(message):
            super()._send_tensor_meta(buffer, *args, **kwargs)
        boundary.dependence = message.dependence
        if message.announces_packets:
            stage.announce(boundary.number, tensors)
            return
        why = "its shape message is not DeepSpeed's"
        if not stage.is_sending:
            why = "its tensors are announced outside of a send instruction"
        elif tensors is None:
            why = f"its message is a {type(buffer).__name__}, not tensors"
        stage.announce(boundary.number, None, why)

    def _recv_tensor_meta(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.ds_compress.stage
        boundary = self.ds_compress.path.boundary_of_shapes(sends=False)
        message = ShapeMessage(stage.shape_links or stage.p2p.original)
        with stage.p2p.shape_messages(message):
            buffers = super()._recv_tensor_meta(*args, **kwargs)
        tensors = tensors_in(buffers) if message.announces_packets else None
        stage.announce(boundary.number, tensors, "the sender announced no packets")
        boundary.dependence = None
        if tensors is None:
            return buffers
        boundary.dependence = message.received(sum(tensor.dtype.is_floating_point for tensor in tensors))
        return receiving(buffers)

    def _allocate_or_extend_buffers(self, idx: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer for every message.

        DeepSpeed shares one per tensor position between activations and gradients and ignores the dtype on
        reuse, so a receive of mixed tuples under dynamic_shape could land in a buffer of the wrong size.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)
