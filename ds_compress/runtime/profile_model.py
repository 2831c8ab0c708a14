"""Profile a pipeline in one process.

A few micro-batches pass its stages one after the other, forward and backward. The compute time and the memory
of each stage are measured, and the messages of every boundary are kept. What crosses a boundary is a copy
without a graph, like DeepSpeed's receive buffers; the gradients of its float tensors go back. Stages are cut
as a `PipelineModule` does.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_compress.errors import CompressionError, failures_at
from ds_compress.message.clock import clock_for
from ds_compress.message.dependence import DependencyTracker, tensors_in
from ds_compress.message.layout import as_list
from ds_compress.planning.evaluate import REPEATS, Messages, is_informative
from ds_compress.runtime.memory_use import in_use

Layer = Callable[[Any], Any]


class Stages:
    """The stages of a pipeline, all in this process."""

    def __init__(
        self,
        specs: Sequence[Any],
        stages: int | Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ):
        """
        Args:
            specs: what `PipelineModule` takes: LayerSpecs, modules, functions.
            stages: their number, cut by DeepSpeed's default, equal numbers of trained parameters; or where
                they begin and end: [0, 3, 6].
            device: device of all stages.
            dtype: of all floating-point parameters; None: unchanged.

        Raises:
            CompressionError: something else than a layer, or fewer layers than stages.
        """
        tied: dict[str, nn.Module] = {}
        built = []
        for number, spec in enumerate(specs):
            with failures_at(f"layer {number}"):
                built.append(_built(spec, number, tied))
        modules = nn.ModuleList(module for module, _ in built if module is not None)
        self.modules = modules.to(device=device, dtype=dtype).train()
        layers = [layer for _, layer in built]
        sizes = [
            sum(p.numel() for p in module.parameters() if p.requires_grad) if module is not None else 0
            for module, _ in built
        ]
        bounds = _bounds(sizes, stages) if isinstance(stages, int) else stages
        self._stages = [layers[start:end] for start, end in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[list[Layer]]:
        return iter(self._stages)


def _built(spec: Any, number: int, tied: dict[str, nn.Module]) -> tuple[nn.Module | None, Layer]:
    """Return the module of a layer, if it has one, and the function to call."""
    if isinstance(spec, TiedLayerSpec):
        module = tied[spec.key] = tied[spec.key] if spec.key in tied else spec.build()
        return module, partial(spec.forward_fn, module) if spec.forward_fn else module
    if isinstance(spec, LayerSpec):
        module = spec.build()
        return module, module
    if not callable(spec) or isinstance(spec, (type, PipelineModule)):
        what = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
        raise CompressionError(
            f"layer {number} is {what}; should be a LayerSpec, a module, or a function of its input"
        )
    return (spec if isinstance(spec, nn.Module) else None), spec


def _bounds(sizes: Sequence[int], stages: int) -> list[int]:
    """Return where stages begin and end, as partition_method "parameters" has it."""
    bounds = [int(bound) for bound in partition_balanced(weights=list(sizes), num_parts=stages)]
    if len(sizes) < stages or any(start == end for start, end in pairwise(bounds)):
        raise CompressionError(
            f"stages: {stages} is not allowed: equal numbers of parameters leave a stage without any of the "
            f"{len(sizes)} layers; use fewer stages, or more layers"
        )
    return bounds


PASSES = 5
"""Micro-batches that are measured, after a first one that is not."""

SCALES = (2.0**16, 2.0**12, 2.0**8, 1.0)
"""Loss scales tried for fp16 gradients, as DeepSpeed does; the first that keeps them finite is used."""

Batch = tuple[Any, Any]
"""Inputs and labels."""


@dataclass(frozen=True)
class ModelProfile:
    """Compute time, memory and messages of a pipeline."""

    forward: tuple[float, ...]  # by stage: median seconds of a pass
    backward: tuple[float, ...]
    activation_bytes: tuple[float, ...]  # by stage, held between the passes of a micro-batch; nan: unknown
    messages: Messages  # of the last micro-batches
    dependence: tuple[tuple[bool, ...], ...]  # by boundary: which float tensors depend on parameters
    loss_scale: float

    @property
    def of_one_micro_batch(self) -> dict[tuple[int, str], list[Tensor]]:
        """Return the tensors of one micro-batch by boundary and direction."""
        return {place: next(iter(own.values())) for place, own in self.messages.items()}


def profile_model(
    stages: Stages, loss_fn: Callable[..., Any] | None, batches: Iterator[Batch], device: torch.device
) -> ModelProfile:
    """Run a few micro-batches through `stages`, and measure them.

    Args:
        loss_fn: of the output of the last stage and the labels; None: that output is the loss.
        batches: endless.

    Raises:
        CompressionError: a stage fails, in one line that names it; or all messages are zero or not finite.
    """
    profiler = _Profiler(stages, loss_fn, device)
    is_fp16 = any(parameter.dtype == torch.float16 for parameter in stages.modules.parameters())
    batch = next(batches)
    for scale in SCALES if is_fp16 else (1.0,):
        profiler.run(batch, scale)
        if is_informative(profiler.messages):
            break
    profiler.clear()
    for _ in range(PASSES):
        profiler.run(next(batches), scale)
    if not is_informative(profiler.messages):
        raise CompressionError("activations or gradients between its stages are zero, or not finite")
    return profiler.profile(scale)


class _Profiler:
    def __init__(self, stages: Stages, loss_fn: Callable[..., Any] | None, device: torch.device):
        self.messages: Messages = {}
        self._times: dict[tuple[int, str], list[tuple[Any, Any]]] = defaultdict(list)  # marks
        self._activation_bytes: dict[int, list[float]] = defaultdict(list)
        self._stages = stages
        self._loss_fn = loss_fn
        self._device = device
        self._clock = clock_for(device)
        self._tracking = DependencyTracker(stages.modules)
        self._dependence: dict[int, tuple[bool, ...]] = {}  # by boundary, once it is known
        self._micro_batch = 0

    def clear(self) -> None:
        """Forget the times and the memory measured so far."""
        self._times.clear()
        self._activation_bytes.clear()

    def profile(self, scale: float) -> ModelProfile:
        def seconds(direction: str) -> tuple[float, ...]:
            marks = (self._times[stage, direction] for stage in range(len(self._stages)))
            return tuple(statistics.median(self._clock.ms(*pair) for pair in own) / 1e3 for own in marks)

        return ModelProfile(
            seconds("forward"),
            seconds("backward"),
            tuple(max(self._activation_bytes[stage]) for stage in range(len(self._stages))),
            self.messages,
            tuple(self._dependence[boundary] for boundary in range(len(self._stages) - 1)),
            scale,
        )

    def run(self, batch: Batch, scale: float) -> None:
        """Run one micro-batch, forward and backward."""
        inputs, labels = tree_map(lambda x: x.to(self._device, copy=True) if torch.is_tensor(x) else x, batch)
        received, outputs = [inputs], []
        last = len(self._stages) - 1
        with nullcontext() if self._dependence else self._tracking:
            for stage, layers in enumerate(self._stages):
                outputs.append(self._forward(stage, layers, received[-1], labels if stage == last else None))
                if stage < last:
                    received.append(self._transfer(stage, outputs[-1]))
        with failures_at(f"stage {last}"), self._timed(last, "backward"):
            (outputs[last] * scale).backward()
        for stage in reversed(range(last)):
            gradients = self._gradients(stage, received[stage + 1])
            floats = [tensor for tensor in as_list(outputs[stage]) if tensor.is_floating_point()]
            with failures_at(f"stage {stage}"), self._timed(stage, "backward"):
                torch.autograd.backward(floats, gradients)
        self._micro_batch += 1

    def _forward(self, stage: int, layers: Sequence[Any], x: Any, labels: Any) -> Any:
        """Return the output of a stage; of the last one the loss."""
        before, input_bytes = in_use(self._device), sum(tensor.nbytes for tensor in tensors_in(x))
        with failures_at(f"stage {stage}"), self._timed(stage, "forward"):
            for layer in layers:
                x = layer(x)
            if stage == len(self._stages) - 1 and self._loss_fn is not None:
                x = self._loss_fn(x, labels)
        after = in_use(self._device)
        self._activation_bytes[stage].append(
            math.nan if before is None or after is None else max(0, after - before) + input_bytes
        )
        if stage == len(self._stages) - 1 and not (torch.is_tensor(x) and x.numel() == 1):
            raise CompressionError(f"the loss is {_kind(x)}; should be a tensor of one element")
        return x

    def _transfer(self, boundary: int, sent: Any) -> Any:
        """Return what the next stage receives."""
        if not torch.is_tensor(sent) and not (
            isinstance(sent, (tuple, list)) and sent and all(map(torch.is_tensor, sent))
        ):
            raise CompressionError(
                f"stage {boundary} gives {_kind(sent)}; should be a tensor or a tuple of tensors, as "
                "DeepSpeed's pipelines send them"
            )
        tensors = as_list(sent)
        self._keep(boundary, "forward", [tensor.detach() for tensor in tensors])
        is_known = boundary in self._dependence
        if not is_known:
            self._dependence[boundary] = self._tracking.dependence(tensors, None)
        with self._tracking.paused():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        received = [copy.requires_grad_(copy.is_floating_point()) for copy in copies]
        if not is_known:
            self._tracking.mark_received(received, self._dependence[boundary])
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
        self.messages.setdefault((boundary, direction), {})[self._micro_batch % REPEATS] = tensors

    @contextmanager
    def _timed(self, stage: int, direction: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._times[stage, direction].append((start, self._clock.mark()))


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if torch.is_tensor(value) else type(value).__name__
