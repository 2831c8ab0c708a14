"""What the tensors of the next message will be like, as DeepSpeed has announced them."""

from collections.abc import Callable

from torch import Tensor

from ds_compress.engine.deepspeed import PipelineEngine
from ds_compress.engine.intercept import Specs, is_alike, refuse
from ds_compress.engine.stage import Stage
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.layout import as_list, tensors_in


def next_message(stage: Stage, channel: Channel, gradients: Callable[[], Specs]) -> Specs | None:
    """Return tensors like those of the next message of `channel`, `gradients()` if it goes backward; None
    where it is left to DeepSpeed."""
    announced = stage.announced.get(channel.boundary.number)
    return announced if announced is None or channel.direction == "forward" else gradients()


def gradients_sent(engine: PipelineEngine, buffer_id: int) -> Specs:
    """Return tensors like the gradients that are sent next; none if they are not known."""
    if engine.is_grad_partitioned:
        return ()
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    if isinstance(inputs, Tensor):
        return (inputs,)
    return [tensor for tensor in tensors_in(inputs) or () if tensor.is_floating_point()]


def gradients_received(engine: PipelineEngine, stage: Stage) -> Specs:
    """Return tensors like the gradients that are received next, in the shapes that their sender knows.

    With `dynamic_shape` later activations may have been announced since theirs left; `grad_layer` is then
    like the outputs of this micro-batch.
    """
    found = tensors_in(engine.grad_layer)
    if found is not None and engine.dynamic_shape:
        return found
    assert stage.after is not None
    announced = [spec for spec in stage.announced.get(stage.after.number, ()) if spec.dtype.is_floating_point]
    if found is None or (len(found) == len(announced) and all(map(is_alike, found, announced))):
        return announced
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
