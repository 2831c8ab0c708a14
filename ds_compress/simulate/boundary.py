"""Both sides of a boundary as a layer of a model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.codec import MessageId
from ds_compress.codecs.message_error import UNKNOWN, MessageError, compare
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.clock import HostClock
from ds_compress.message.dependence import DependencyTracker
from ds_compress.message.gradient_error import AVERAGED, GradientError
from ds_compress.message.meters import SendingMeter
from ds_compress.message.observer import Observer, SeenMessage
from ds_compress.monitor.guard_limits import MessageQuality
from ds_compress.monitor.lines import violation_note
from ds_compress.monitor.metrics import residual_values
from ds_compress.transport.codec_stream import without_autocast

logger = logging.getLogger("ds_compress")


@dataclass
class SimulatedEnd:
    """The sending end of a channel."""

    channel: Channel
    observers: list[Observer]
    sends = True


class SimulatedBoundary(nn.Module):
    """Both sides of one boundary as a layer: it returns its input as the next stage would receive it.

    A forward pass in training mode with gradients on is one micro-batch, and every `micro_batches` of them
    are one step; all other passes are evaluation. Do not put it inside an activation checkpoint: recomputing
    would send again.
    """

    def __init__(
        self,
        number: int,
        config: Config,
        micro_batches: int,
        tracking: DependencyTracker | None,
        replica: int = 0,
    ):
        """Set up both sides; `tracking`: of the model, if tensors that depend on no parameter are exempt."""
        super().__init__()
        self.config = config
        self.upstream = Boundary(number, config, replica)
        self.downstream = Boundary(number, config, replica)
        self.micro_batches = micro_batches
        self.meters = TrafficMeter(self.upstream.forward), TrafficMeter(self.downstream.backward)
        self.ends = {each.channel.direction: SimulatedEnd(each.channel, [each]) for each in self.meters}
        self._tracking = tracking
        self.trained = 0  # micro-batches so far
        self._evaluated = 0
        self._answered = 0  # messages of the step that came back
        self.is_answered = True  # all gradients of the latest step have arrived

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        sent = (tensors,) if isinstance(tensors, Tensor) else tensors
        message_id = self._next_id()
        if self._tracking is None:
            outputs = _Cross.apply(self, message_id, *sent)
        else:
            dependence = self._tracking.dependence(sent, self.upstream.dependence)
            self.upstream.dependence = self.downstream.dependence = dependence
            with self._tracking.paused():
                outputs = _Cross.apply(self, message_id, *sent)
            self._tracking.mark_received(outputs, dependence or ())
        if message_id.training:
            self.upstream.sample_ids.pop(message_id.micro_batch, None)  # the next pass has others
        return outputs[0] if isinstance(tensors, Tensor) else outputs

    def announce(self, ids: Tensor) -> None:
        """Set the `ids` of the samples of the next training pass."""
        if self.training and torch.is_grad_enabled():
            self.upstream.sample_ids[self.trained % self.micro_batches] = ids

    def _next_id(self) -> MessageId:
        step = self.trained // self.micro_batches
        if not (self.training and torch.is_grad_enabled()):
            self._evaluated += 1
            number = (self._evaluated - 1) % self.micro_batches
            return self.upstream.forward.message_id(step, number, training=False)
        message_id = self.upstream.forward.message_id(step, self.trained % self.micro_batches)
        wants_samples = self.config.in_force.sample_ids is not None
        if wants_samples and message_id.micro_batch not in self.upstream.sample_ids:
            raise CompressionError(
                f"simulate: boundary {self.upstream.number}: the samples of this training pass are unknown; "
                "call announce(model, batch) before it"
            )
        if message_id.micro_batch == 0:
            self._end_step()  # of a step without backward passes
            for side in (self.upstream, self.downstream):
                side.begin_step()
            self._answered, self.is_answered = 0, False
        self.trained += 1
        return message_id

    def answered(self) -> None:
        """Count a gradient that has arrived; the last one ends the step, as in a pipeline."""
        self._answered += 1
        if self._answered == self.micro_batches:
            self._end_step()

    def _end_step(self) -> None:
        if not self.is_answered:
            self.is_answered = True
            for meter in self.meters:
                meter.warn()

    def transfer(
        self, source: Channel, target: Channel, tensors: Sequence[Tensor], message_id: MessageId
    ) -> list[Tensor]:
        """Send `tensors`, and return them as they arrive."""
        with without_autocast():
            message = SeenMessage(source, message_id, tensors)
            for observer in self.ends[source.direction].observers:
                observer.before(message)
            message.encoded = encoded = source.encode(tensors, message_id)
            layout = target.layout_of(tensors, message_id)
            arrived = target.decode(encoded.packet, layout, message_id, lambda nbytes: encoded.extra)
            message.decoded = arrived
            for observer in self.ends[source.direction].observers:
                observer.after(message)
            return arrived


class TrafficMeter(Observer):
    """Errors of the messages that a channel sends in training: their mean, and against the limits of the
    guard in the steps that it checks."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.gradient_error = 0.0  # largest of all checks
        self._messages = 0
        # on the device of the messages after the first: adding does not wait
        self._total: Tensor = torch.zeros((), dtype=torch.float64, device="cpu")
        self._gradients = GradientError() if channel.direction == "backward" else None
        self._meter: SendingMeter | None = None  # of a step that is checked
        self._before: dict[str, float] = {}  # values of the check before
        self._warned: set[tuple[str, str]] = set()  # (codec, limit)

    def after(self, message: SeenMessage) -> None:
        assert message.encoded is not None and message.decoded is not None
        layout, config = message.encoded.layout, self.channel.boundary.config
        sent, arrived = layout.compressed_of(message.tensors), layout.compressed_of(message.decoded)
        if not message.message_id.training or not sent:
            return
        self._total = self._total + compare(sent, arrived)
        self._messages += 1
        if config.block.guard.is_due(message.message_id.step + 1 - config.warmup_steps):
            compared = range(AVERAGED if self._gradients else 1)
            self._meter = self._meter or SendingMeter(HostClock(), compared, self._gradients)
            self._meter.after(message)

    @property
    def error(self) -> MessageError:
        """Return the mean; nan without messages, or after one that was not finite."""
        return MessageError(*(self._total / self._messages).tolist()) if self._messages else UNKNOWN

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the limits that were exceeded."""
        return tuple(sorted({limit for _, limit in self._warned}))

    def warn(self) -> None:
        """Log each value of the step beyond a limit, once per limit and codec, as the monitor does."""
        channel, meter, self._meter = self.channel, self._meter, None
        if meter is None:
            return
        if meter.failure:
            logger.warning(f"ds_compress: simulate: a message cannot be judged: {meter.failure}")
        values = meter.values()
        self.gradient_error = max(self.gradient_error, values["gradient_error"])
        values |= residual_values(channel, values["message_norm"])
        config, codec = channel.boundary.config, str(channel.codec)
        quality = MessageQuality.of(values, self._before, channel.direction)
        found = quality.violations(config.block.guard)
        violations = [each for each in found if (codec, each.limit) not in self._warned]
        self._before = values
        self._warned.update((codec, each.limit) for each in violations)
        if violations:
            logger.warning(violation_note(config, [channel.boundary.number], channel.direction, violations))


class _Cross(torch.autograd.Function):
    """Forward: a packet from upstream to downstream; backward: a packet back."""

    @staticmethod
    def forward(
        ctx: Any, boundary: SimulatedBoundary, message_id: MessageId, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.boundary, ctx.message_id = boundary, message_id
        ctx.floats = [tensor.dtype.is_floating_point for tensor in tensors]
        upstream, downstream = boundary.upstream.forward, boundary.downstream.forward
        arrived = boundary.transfer(upstream, downstream, tensors, message_id)
        outputs = [tensor.clone() for tensor in arrived]  # as DeepSpeed does: a layer may overwrite its input
        ctx.mark_non_differentiable(*(t for t, is_float in zip(outputs, ctx.floats) if not is_float))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = [gradient for gradient, is_float in zip(gradients, ctx.floats) if is_float]
        source, target = ctx.boundary.downstream.backward, ctx.boundary.upstream.backward
        message_id = replace(ctx.message_id, direction="backward")
        arrived = iter(ctx.boundary.transfer(source, target, sent, message_id))
        ctx.boundary.answered()
        return None, None, *(next(arrived) if is_float else None for is_float in ctx.floats)
