"""The channels of a pipeline inside one process: for one GPU, a notebook, or to compare with a pipeline.

Each boundary becomes a step between two layers that packs what crosses it, and what its gradient sends back,
with the objects that the pipeline engine uses: the losses are those of the real pipeline.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.codec import MessageId
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.feedback.sample_ids import SampleIds
from ds_compress.message.carrying import Tracking
from ds_compress.message.channel import Boundary, Channel


class SimulatedBoundary(nn.Module):
    """Both sides of one boundary as a layer: its input comes out as the next stage would receive it.

    A forward pass in training mode with gradients on is one micro-batch, and every `micro_batches` of them
    are one step; all other passes are evaluation. Do not put it inside an activation checkpoint: recomputing
    would send again.
    """

    def __init__(self, number: int, config: Config, micro_batches: int, tracking: Tracking | None):
        """`tracking`: of the whole model, where the boundary may have to know which tensors carry."""
        super().__init__()
        self.upstream = Boundary(number, config)
        self.downstream = Boundary(number, config)
        self.micro_batches = micro_batches
        self._tracking = tracking
        self._trained = 0  # micro-batches so far
        self._evaluated = 0
        self._answered = 0  # messages of the step that came back
        self._step_open = False

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        sent = (tensors,) if isinstance(tensors, Tensor) else tensors
        message_id = self._next_id()
        if self._tracking is None:
            outputs = _Cross.apply(self, message_id, *sent)
        else:
            carrying = self._tracking.of(sent, self.upstream.carrying)
            self.upstream.carrying = self.downstream.carrying = carrying
            with self._tracking.paused():
                outputs = _Cross.apply(self, message_id, *sent)
            self._tracking.add_float(outputs, carrying)
        return outputs[0] if isinstance(tensors, Tensor) else outputs

    def announce(self, ids: Tensor) -> None:
        """The next training pass is about the samples `ids`."""
        if self.training and torch.is_grad_enabled():
            self.upstream.sample_ids[self._trained % self.micro_batches] = ids
            self.upstream.prefetch(ids)

    def _next_id(self) -> MessageId:
        step = self._trained // self.micro_batches
        if not (self.training and torch.is_grad_enabled()):
            self._evaluated += 1
            number = (self._evaluated - 1) % self.micro_batches
            return self.upstream.forward.message_id(step, number, training=False)
        message_id = self.upstream.forward.message_id(step, self._trained % self.micro_batches)
        if message_id.micro_batch == 0:
            self._end_step()  # of a step without backward passes
            for side in (self.upstream, self.downstream):
                side.begin_step()
            self._answered, self._step_open = 0, True
        self._trained += 1
        return message_id

    def answered(self) -> None:
        """The gradient of a message has crossed; with that of the last one the step ends, as in a
        pipeline."""
        self._answered += 1
        if self._answered == self.micro_batches:
            self._end_step()

    def _end_step(self) -> None:
        if self._step_open:
            self._step_open = False
            for side in (self.upstream, self.downstream):
                side.end_step(average=lambda tensor: tensor)


class _Cross(torch.autograd.Function):
    """Forward: a packet from upstream to downstream; backward: a packet back."""

    @staticmethod
    def forward(ctx, boundary: SimulatedBoundary, message_id: MessageId, *tensors: Tensor):
        ctx.boundary, ctx.message_id = boundary, message_id
        ctx.floats = [tensor.dtype.is_floating_point for tensor in tensors]
        outputs = _transfer(boundary.upstream.forward, boundary.downstream.forward, tensors, message_id)
        ctx.mark_non_differentiable(*(t for t, is_float in zip(outputs, ctx.floats) if not is_float))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        sent = [gradient for gradient, is_float in zip(gradients, ctx.floats) if is_float]
        source, target = ctx.boundary.downstream.backward, ctx.boundary.upstream.backward
        message_id = replace(ctx.message_id, direction="backward")
        arrived = iter(_transfer(source, target, sent, message_id))
        ctx.boundary.answered()
        return None, None, *(next(arrived) if is_float else None for is_float in ctx.floats)


def _transfer(
    source: Channel, target: Channel, tensors: Sequence[Tensor], message_id: MessageId
) -> list[Tensor]:
    packet, rest, _ = source.encode(tensors, message_id)
    return target.decode(packet, target.message(tensors, message_id), message_id, lambda nbytes: rest)


def simulate(model: nn.Module, ds_config: dict[str, Any], cuts: Sequence[int]) -> nn.Module:
    """Put simulated boundaries between the layers of `model`.

    Args:
        model: an `nn.Sequential`, or a `PipelineModule` that was built with one stage.
        ds_config: the whole config: its "ds_compress" block and its "gradient_accumulation_steps" (default 1)
            count.
        cuts: index of the first layer after each boundary, ascending: [4, 8] makes three stages.

    Returns:
        A new `nn.Sequential` that shares the layers of `model`; a `PipelineModule` is changed in place and
        returned.

    Raises:
        CompressionError: a bad block, a cut that is not between two layers, or a model of another kind.
    """
    config = Config(ds_config.get(KEY, {}))
    config.check_boundaries(len(cuts))
    config.count_epochs(None)
    layers: Any = list(model) if isinstance(model, nn.Sequential) else getattr(model, "forward_funcs", None)
    if layers is None:
        raise CompressionError(
            f"simulate: {type(model).__name__} has no list of layers; allowed: nn.Sequential, PipelineModule"
        )
    if list(cuts) != sorted(set(cuts)) or not all(0 < cut < len(layers) for cut in cuts):
        raise CompressionError(f"simulate: cuts {list(cuts)} must ascend and lie in 1..{len(layers) - 1}")
    if not config.block.enabled:
        return model
    config.prepare()

    micro_batches = ds_config.get("gradient_accumulation_steps", 1)
    tracking = _tracking(config, len(cuts), model)
    boundaries = [SimulatedBoundary(number, config, micro_batches, tracking) for number in range(len(cuts))]
    for number, cut in reversed(list(enumerate(cuts))):
        layers.insert(cut, boundaries[number])
        if not isinstance(model, nn.Sequential):
            model.add_module(f"boundary_{number}", boundaries[number])
    simulated = nn.Sequential(*layers) if isinstance(model, nn.Sequential) else model
    if tracking is not None:
        _follow(simulated, boundaries, tracking)
    if boundaries and config.sample_ids:
        _follow_samples(simulated, boundaries, config.sample_ids)
    return simulated


def _tracking(config: Config, boundaries: int, model: nn.Module) -> Tracking | None:
    """What finds out which tensors carry, if a codec with a loss may meet several of them in a message."""
    codecs = [
        getattr(config.codecs(number), direction) for number in range(boundaries) for direction in DIRECTIONS
    ]
    lossy = any(codec.name != "none" for codec in codecs)
    return Tracking(model) if lossy and config.block.tensors == "large" else None


def _follow(model: nn.Module, boundaries: list[SimulatedBoundary], tracking: Tracking) -> None:
    """Track what carries in passes through `model` until every boundary knows."""

    def begin(*_: Any) -> None:
        if any(boundary.upstream.carrying is None for boundary in boundaries):
            tracking.__enter__()
            running.append(True)

    def end(*_: Any) -> None:
        if running:
            running.pop()
            tracking.__exit__(None, None, None)

    running: list[bool] = []
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def _follow_samples(model: nn.Module, boundaries: list[SimulatedBoundary], source: SampleIds) -> None:
    """Take the ids of the samples from what goes into `model`, and hand them from boundary to boundary."""
    if source.column is not None:
        raise CompressionError(
            'simulate: has no data loader to return a column of ids; allowed: "ids": "hash"'
        )
    model.register_forward_pre_hook(lambda module, inputs: boundaries[0].announce(source.of(inputs)))
    for earlier, later in itertools.pairwise(boundaries):
        later.upstream.sample_ids = earlier.downstream.sample_ids
