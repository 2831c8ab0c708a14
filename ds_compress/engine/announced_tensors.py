"""What the tensors of the next message will be like, as DeepSpeed has announced them.

DeepSpeed announces the tensors of forward messages (`Stage.announced`, by boundary). Gradients have the
shapes and dtypes of those that are floats.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from torch import Tensor

from ds_compress.codec import TensorSpec
from ds_compress.engine.deepspeed import PipelineEngine
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.layout import as_list, tensors_in

Specs = Sequence[TensorSpec | Tensor]
"""Tensors, or others like them, that a message will have."""


def next_message(
    announced: Mapping[int, Specs], channel: Channel, gradients: Callable[[], Specs]
) -> Specs | None:
    """Return tensors like those of the next message of `channel`, `gradients()` if it goes backward; None
    where it is left to DeepSpeed."""
    specs = announced.get(channel.boundary.number)
    return specs if specs is None or channel.direction == "forward" else gradients()


def gradients_sent(engine: PipelineEngine, buffer_id: int) -> Specs:
    """Return tensors like the gradients that are sent next; none if they are not known."""
    if engine.is_grad_partitioned:
        return ()
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    if isinstance(inputs, Tensor):
        return (inputs,)
    return [tensor for tensor in tensors_in(inputs) or () if tensor.is_floating_point()]


def gradients_received(engine: PipelineEngine, announced: Mapping[int, Specs], boundary: Boundary) -> Specs:
    """Return tensors like the gradients that are received next, in the shapes that their sender knows.

    With `dynamic_shape` later activations may have been announced since theirs left; `grad_layer` is then
    like the outputs of this micro-batch.
    """
    found = tensors_in(engine.grad_layer)
    if found is not None and engine.dynamic_shape:
        return found
    floats = [spec for spec in announced.get(boundary.number, ()) if spec.dtype.is_floating_point]
    if found is None or (len(found) == len(floats) and all(map(is_alike, found, floats))):
        return floats
    return found


def check_gradients(engine: PipelineEngine, buffer_id: int, boundary: Boundary) -> None:
    """Check that gradients of a micro-batch are received in the shapes of its outputs: DeepSpeed receives all
    in the shapes of the first ones.

    Raises:
        CompressionError: they are not; autograd would refuse them.
    """
    layer = engine.grad_layer
    if layer is None or engine.dynamic_shape or engine.is_pipe_partitioned:
        return
    outputs = as_list(engine.pipe_buffers["outputs"][buffer_id])
    floats = [tensor for tensor in outputs if tensor.is_floating_point()]
    gradients = as_list(layer)
    for number, (output, gradient) in enumerate(zip(floats, gradients)):
        if output.shape != gradient.shape:
            refuse(boundary.forward, number, output, gradients)


def is_alike(tensor: Tensor, spec: TensorSpec | Tensor) -> bool:
    """Return whether `tensor` has the dtype and the number of values of one like `spec`."""
    return tensor.dtype == spec.dtype and tensor.numel() == math.prod(spec.shape)


def as_announced(channel: Channel, tensors: Sequence[Tensor], specs: Specs) -> list[Tensor]:
    """Return the tensors of a message in the shapes announced for them.

    Raises:
        CompressionError: their number is another one, or one has another dtype or number of values.
    """
    if len(tensors) != len(specs):
        count = f"a message of {len(tensors)} tensors, announced were {len(specs)}"
        raise CompressionError(f"{channel.place}: {count}; {CHANGE_SHAPES}")
    for number, (tensor, spec) in enumerate(zip(tensors, specs)):
        if not is_alike(tensor, spec):
            refuse(channel, number, tensor, specs)
    return [
        tensor if tensor.shape == spec.shape else tensor.detach().reshape(spec.shape)
        for tensor, spec in zip(tensors, specs)
    ]


def refuse(channel: Channel, number: int, tensor: Tensor | TensorSpec, specs: Specs) -> NoReturn:
    """Raise for a tensor of a message that is not the one announced as `specs[number]`."""
    spec = specs[number]
    raise CompressionError(
        f"{channel.place}: tensor {number} of {len(specs)} is {_describe(tensor)}, announced was "
        f"{_describe(spec)}; {CHANGE_SHAPES}"
    )


CHANGE_SHAPES = (
    "call engine.reset_activation_shape() on every rank before a batch of another shape or dtype; if they "
    "differ within a batch, build the PipelineModule with dynamic_shape=True"
)


def _describe(tensor: Tensor | TensorSpec) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
