"""A pipeline rehearsed in one process: a few micro-batches pass its stages one after the other, forward and
back. How long each stage computes is measured, and what would cross every boundary is kept.

What crosses is a copy without a past, as DeepSpeed's receive buffers are; gradients of its float tensors go
back.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_compress.errors import CompressionError, failures_at
from ds_compress.message.carrying import Tracking, tensors_in
from ds_compress.message.clock import clock_for
from ds_compress.message.layout import as_list
from ds_compress.planning.trial import REPEATS, Messages, tell
from ds_compress.runtime.local_stages import Stages
from ds_compress.runtime.memory_use import in_use

PASSES = 5
"""Micro-batches that are measured, after one that is not."""

SCALES = (2.0**16, 2.0**12, 2.0**8, 1.0)
"""Of the loss where gradients are fp16, as DeepSpeed has it: the first under which they are finite."""

Batch = tuple[Any, Any]
"""Inputs, and labels."""


@dataclass(frozen=True)
class Rehearsed:
    forward: tuple[float, ...]  # by stage: seconds of a pass, the median
    backward: tuple[float, ...]
    held: tuple[float, ...]  # by stage: bytes between the passes of a micro-batch; nan: nobody knows
    messages: Messages  # of the last micro-batches
    carrying: tuple[tuple[bool, ...], ...]  # by boundary: which float tensors of a message carry
    loss_scale: float

    @property
    def of_one_micro_batch(self) -> dict[tuple[int, str], list[Tensor]]:
        """Tensors by boundary and direction."""
        return {place: next(iter(own.values())) for place, own in self.messages.items()}


def rehearse(
    stages: Stages, loss_fn: Callable[..., Any] | None, batches: Iterator[Batch], device: torch.device
) -> Rehearsed:
    """
    Args:
        loss_fn: of what the last stage gives and of labels; None: that is the loss.
        batches: endless.

    Raises:
        CompressionError: something fails, in one line that names the stage; or the messages tell nothing.
    """
    rehearsal = _Rehearsal(stages, loss_fn, device)
    fp16 = any(parameter.dtype == torch.float16 for parameter in stages.modules.parameters())
    batch = next(batches)
    for scale in SCALES if fp16 else (1.0,):
        rehearsal.pass_through(batch, scale)
        if tell(rehearsal.messages):
            break
    rehearsal.times.clear()
    rehearsal.held.clear()
    for _ in range(PASSES):
        rehearsal.pass_through(next(batches), scale)
    if not tell(rehearsal.messages):
        raise CompressionError("activations or gradients between its stages are zero, or not finite")
    return rehearsal.found(scale)


class _Rehearsal:
    def __init__(self, stages: Stages, loss_fn: Callable[..., Any] | None, device: torch.device):
        self.messages: Messages = {}
        self.times: dict[tuple[int, str], list[tuple[Any, Any]]] = defaultdict(list)  # marks
        self.held: dict[int, list[float]] = defaultdict(list)
        self._stages = stages
        self._loss_fn = loss_fn
        self._device = device
        self._clock = clock_for(device)
        self._tracking = Tracking(stages.modules)
        self._carrying: dict[int, tuple[bool, ...]] = {}  # by boundary, once it is known
        self._number = 0  # of the next micro-batch

    def found(self, scale: float) -> Rehearsed:
        def seconds(direction: str) -> tuple[float, ...]:
            marks = (self.times[stage, direction] for stage in range(len(self._stages)))
            return tuple(statistics.median(self._clock.ms(*pair) for pair in own) / 1e3 for own in marks)

        return Rehearsed(
            seconds("forward"),
            seconds("backward"),
            tuple(max(self.held[stage]) for stage in range(len(self._stages))),
            self.messages,
            tuple(self._carrying[boundary] for boundary in range(len(self._stages) - 1)),
            scale,
        )

    def pass_through(self, batch: Batch, scale: float) -> None:
        """One micro-batch, forward and back."""
        inputs, labels = tree_map(self._placed, batch)
        arrived, given = [inputs], []
        last = len(self._stages) - 1
        with nullcontext() if self._carrying else self._tracking:
            for stage, layers in enumerate(self._stages):
                given.append(self._forward(stage, layers, arrived[-1], labels if stage == last else None))
                if stage < last:
                    arrived.append(self._crossed(stage, given[-1]))
        with failures_at(f"stage {last}"), self._timed(last, "backward"):
            (given[last] * scale).backward()
        for stage in reversed(range(last)):
            gradients = self._gradients(stage, arrived[stage + 1])
            floats = [tensor for tensor in as_list(given[stage]) if tensor.is_floating_point()]
            with failures_at(f"stage {stage}"), self._timed(stage, "backward"):
                torch.autograd.backward(floats, gradients)
        self._number += 1

    def _placed(self, value: Any) -> Any:
        return value.to(self._device, copy=True) if torch.is_tensor(value) else value

    def _forward(self, stage: int, layers: Sequence[Any], x: Any, labels: Any) -> Any:
        """What a stage gives: the last one the loss."""
        before, came = in_use(self._device), sum(tensor.nbytes for tensor in tensors_in(x))
        with failures_at(f"stage {stage}"), self._timed(stage, "forward"):
            for layer in layers:
                x = layer(x)
            if stage == len(self._stages) - 1 and self._loss_fn is not None:
                x = self._loss_fn(x, labels)
        after = in_use(self._device)
        self.held[stage].append(
            math.nan if before is None or after is None else max(0, after - before) + came
        )
        if stage == len(self._stages) - 1 and not (torch.is_tensor(x) and x.numel() == 1):
            raise CompressionError(f"the loss is {_kind(x)}; should be a tensor of one element")
        return x

    def _crossed(self, boundary: int, sent: Any) -> Any:
        """What the next stage receives."""
        if not torch.is_tensor(sent) and not (
            isinstance(sent, (tuple, list)) and sent and all(map(torch.is_tensor, sent))
        ):
            raise CompressionError(
                f"stage {boundary} gives {_kind(sent)}; should be a tensor or a tuple of tensors, as "
                "DeepSpeed's pipelines send them"
            )
        tensors = as_list(sent)
        self._keep(boundary, "forward", [tensor.detach() for tensor in tensors])
        known = boundary in self._carrying
        if not known:
            self._carrying[boundary] = self._tracking.of(tensors, None)
        with self._tracking.paused():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        received = [copy.requires_grad_(copy.is_floating_point()) for copy in copies]
        if not known:
            self._tracking.add_float(received, self._carrying[boundary])
        return received[0] if torch.is_tensor(sent) else tuple(received)

    def _gradients(self, boundary: int, received: Any) -> list[Tensor]:
        floats = [tensor for tensor in as_list(received) if tensor.is_floating_point()]
        found = [tensor.grad for tensor in floats if tensor.grad is not None]
        if len(found) < len(floats) or not found:
            raise CompressionError(
                f"boundary {boundary}: the loss does not depend on every float tensor of its message; "
                "DeepSpeed's pipelines send a gradient for each, and one at least"
            )
        self._keep(boundary, "backward", found)
        return found

    def _keep(self, boundary: int, direction: str, tensors: list[Tensor]) -> None:
        self.messages.setdefault((boundary, direction), {})[self._number % REPEATS] = tensors

    @contextmanager
    def _timed(self, stage: int, direction: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self.times[stage, direction].append((start, self._clock.mark()))


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if torch.is_tensor(value) else type(value).__name__
