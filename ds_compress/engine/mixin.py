"""The mixin that goes over a live `PipelineEngine`; `attach` puts it there.

Nothing of DeepSpeed is copied: each of the four instructions that move tensors runs DeepSpeed's own code
inside a context of `Stage`. `_exec_schedule` takes functions from the class's `_INSTRUCTION_MAP`, not methods
by name, so the mixin brings its own map, a ChainMap over the engine's: entries that others patch later stay
in force. All that is ours on an engine is one attribute, its `Session`.
"""

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.engine.evaluation import evaluate_both
from ds_compress.engine.intercept import receiving
from ds_compress.engine.session import Session
from ds_compress.engine.stage import Instruction
from ds_compress.message.layout import as_list

_TENSORS = {
    Instruction.RECV_ACTIVATION: operator.attrgetter("pipe_recv_buf"),
    Instruction.RECV_GRAD: operator.attrgetter("grad_layer"),
}
"""Of an engine, those that a receive instruction fills."""

_UNTIMED = contextlib.nullcontext()

_Engine: Any = object
"""What stands behind a mixin: DeepSpeed's engine, which has no types."""


class CompressedEngine(_Engine):
    """Runs DeepSpeed's pipeline with every stage message in one packet.

    Mixed in before the engine's own class, so `isinstance(engine, PipelineEngine)` and every override keep
    working.
    """

    ds_compress: Session

    _AROUND: ClassVar[dict[type, str]] = {
        schedule.ForwardPass: "_forward_pass",
        schedule.BackwardPass: "_backward_pass",
        schedule.SendActivation: "_send_activations",
        schedule.RecvActivation: "_recv_activations",
        schedule.SendGrad: "_send_grads",
        schedule.RecvGrad: "_recv_grads",
    }
    """By instruction, the method that runs in the place of DeepSpeed's function."""

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.batch():
            return super().train_batch(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        session, evaluate = self.ds_compress, super().eval_batch
        with session.watchdog.watch():
            return evaluate_both(self, session, evaluate, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.watchdog.watch(sends_messages=False):
            return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.ds_compress.watchdog.watch(sends_messages=False):
            return super().load_checkpoint(*args, **kwargs)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        with self.ds_compress.running(pipe_schedule) as chosen:
            super()._exec_schedule(chosen)

    def _next_batch(self) -> Any:
        return self.ds_compress.next_batch(super()._next_batch)

    def _save_checkpoint(self, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(save_dir, tag, *args, **kwargs)
        self.ds_compress.checkpointer.save(Path(save_dir), str(tag))

    def _save_moe_checkpoint(self, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_moe_checkpoint(save_dir, tag, *args, **kwargs)
        self.ds_compress.checkpointer.save(Path(save_dir), str(tag))

    def _load_checkpoint(self, load_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        path, client_state = super()._load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            restores = not kwargs.get("load_module_only")
            self.ds_compress.checkpointer.load(Path(load_dir), str(tag), restores)
        return path, client_state

    def _forward_pass(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        session = self.ds_compress
        measuring = session.depth.measuring
        with measuring.timed("forward", buffer_id) if measuring else _UNTIMED:
            session.stock[schedule.ForwardPass](self, buffer_id, *args, **kwargs)
        # A shape message that goes DeepSpeed's way goes first, in its own order
        shapes_known = bool(session.stage.shape_links) or not (self.dynamic_shape or self.first_output_send)
        if (
            session.is_eager
            and shapes_known
            and session.lookahead.leaves_early(schedule.ForwardPass, buffer_id)
        ):
            self._INSTRUCTION_MAP[schedule.SendActivation](self, buffer_id)

    def _backward_pass(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        session = self.ds_compress
        measuring = session.depth.measuring
        with measuring.timed("backward", buffer_id) if measuring else _UNTIMED:
            session.stock[schedule.BackwardPass](self, buffer_id, *args, **kwargs)
        if session.is_eager and session.lookahead.leaves_early(schedule.BackwardPass, buffer_id):
            self._INSTRUCTION_MAP[schedule.SendGrad](self, buffer_id)

    def _send_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        session = self.ds_compress
        if session.lookahead.at[0] not in session.lookahead.left:
            run = partial(session.stock[schedule.SendActivation], self, buffer_id, *args, **kwargs)
            self._send(Instruction.SEND_ACTIVATION, buffer_id, run)

    def _send_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        session = self.ds_compress
        if session.lookahead.at[0] not in session.lookahead.left:
            run = partial(session.stock[schedule.SendGrad], self, buffer_id, *args, **kwargs)
            self._send(Instruction.SEND_GRAD, buffer_id, run)

    def _recv_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(self.ds_compress.stock[schedule.RecvActivation], self, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_ACTIVATION, buffer_id, run)

    def _recv_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(self.ds_compress.stock[schedule.RecvGrad], self, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_GRAD, buffer_id, run)

    def _send(self, instruction: Instruction, buffer_id: int, run: Callable[[], None]) -> None:
        session = self.ds_compress
        if not session.stage.in_schedule:
            session.stage.enter_unscheduled(session.step_context())
        session.stage.send(instruction, buffer_id, run)

    def _receive(self, instruction: Instruction, buffer_id: int, run: Callable[[], None]) -> None:
        session, stage = self.ds_compress, self.ds_compress.stage
        if not stage.in_schedule:
            stage.enter_unscheduled(session.step_context())
        stage.receive(instruction, buffer_id, run, partial(_TENSORS[instruction], self))
        if instruction is Instruction.RECV_ACTIVATION:
            session.mark_received(self.pipe_buffers["inputs"][buffer_id], stage.before)

    # Some projects call these directly instead of through a schedule

    def _exec_send_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_send_activations, buffer_id, *args, **kwargs)
        self._send(Instruction.SEND_ACTIVATION, buffer_id, run)

    def _exec_send_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_send_grads, buffer_id, *args, **kwargs)
        self._send(Instruction.SEND_GRAD, buffer_id, run)

    def _exec_recv_activations(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_recv_activations, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_ACTIVATION, buffer_id, run)

    def _exec_recv_grads(self, buffer_id: int, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._exec_recv_grads, buffer_id, *args, **kwargs)
        self._receive(Instruction.RECV_GRAD, buffer_id, run)

    def _send_tensor_meta(self, buffer: Any, *args: Any, **kwargs: Any) -> None:
        session, tensors = self.ds_compress, as_list(buffer)
        boundary = session.boundary_of_shapes(sends=True)
        carrying = session.tracking.of(tensors, boundary.carrying) if session.tracking is not None else None
        written = 2 + sum(2 + tensor.dim() for tensor in tensors)
        message = session.stage.shape_message(carrying, written)
        with session.stage.shape_messages(message):
            super()._send_tensor_meta(buffer, *args, **kwargs)
        boundary.carrying = message.carrying

    def _recv_tensor_meta(self, *args: Any, **kwargs: Any) -> Any:
        session = self.ds_compress
        message = session.stage.shape_message()
        with session.stage.shape_messages(message):
            buffers = super()._recv_tensor_meta(*args, **kwargs)
        floats = sum(tensor.dtype.is_floating_point for tensor in as_list(buffers))
        session.boundary_of_shapes(sends=False).carrying = message.received(floats)
        return receiving(buffers)

    def _allocate_or_extend_buffers(self, idx: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """A buffer of its own for every message.

        DeepSpeed shares one per tensor position between activations and gradients and ignores the dtype on
        reuse, so a receive of mixed tuples under dynamic_shape could land in a buffer of the wrong size.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)
