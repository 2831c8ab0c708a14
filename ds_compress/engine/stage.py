"""Send and receive the messages of one pipeline stage, over the links of its two boundaries."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.codec import MessageId, TensorSpec
from ds_compress.config import Config
from ds_compress.engine.announced_tensors import Specs
from ds_compress.engine.intercept import PointToPoint, ShapeLinks
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.transport.codec_stream import Made
from ds_compress.transport.p2p import ExchangeConnections


class StepContext(NamedTuple):
    """What the messages of a schedule, or those sent one by one outside of any, have in common."""

    step: int  # optimizer steps done before
    training: bool
    loss_scale: float = 1.0
    uncompressed_tail: int = 0
    """How many tensors at the end of a forward message are never compressed: DeepSpeed sends a bool mask in
    last place, as half precision, so it is float."""


class Stage:
    """All messages of one stage.

    A forward message is known by its number among those of its boundary and step, which both sides count
    alike. A backward message has the number of the forward message that it answers: each side remembers which
    one the engine's buffer held. Buffer ids themselves differ between the sides, and are used again within a
    step.
    """

    def __init__(self, config: Config, p2p: PointToPoint, before: Boundary | None, after: Boundary | None):
        """
        Args:
            before: boundary to the previous stage; None at the first stage.
            after: boundary to the next stage; None at the last stage.
        """
        self.config = config
        self.before = before
        self.after = after
        self.p2p = p2p
        self.senders: dict[tuple[type, int], SendingEnd] = {}
        """By instruction, and phase of DualPipeV, which has each twice; 0 elsewhere."""

        self.receivers: dict[tuple[type, int], ReceivingEnd] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # of the forward message, by boundary and buffer
        self._samples: dict[int, Tensor] = {}  # ids, by buffer
        self._unplaced: deque[Tensor] = deque()  # ids of batches in unknown buffers
        self.in_schedule = False
        self.groups: list[Any] = []  # process groups of its channels and exchanges
        self.connections = 1  # of each channel and exchange
        self.exchange_connections: list[ExchangeConnections] = []
        self.extra_groups: set[str] = set()  # directions whose extra packets have a group of their own
        self.shape_links: ShapeLinks | None = None  # None: shape messages go DeepSpeed's way
        self.announced: dict[int, Specs] = {}
        """The tensors of forward messages, by boundary, which both sides know from the latest shape message;
        none of a boundary that is left to DeepSpeed."""

        self.left_because: dict[int, str] = {}  # why boundaries are left to DeepSpeed
        self.step = 0
        self.training = False

    @property
    def boundaries(self) -> list[Boundary]:
        return [boundary for boundary in (self.before, self.after) if boundary is not None]

    @property
    def ends(self) -> list[SendingEnd | ReceivingEnd]:
        return [*self.senders.values(), *self.receivers.values()]

    @property
    def sending(self) -> list[Channel]:
        """Return the channels that this stage sends on."""
        return [end.channel for end in self.senders.values()]

    @contextmanager
    def running(self, context: StepContext, counts: Mapping[type, int]) -> Iterator[None]:
        """Run one schedule of the engine; returns when all packets have left.

        Args:
            counts: how many messages the schedule receives, where they are to be received ahead.
        """
        self._begin(context, counts)
        self.in_schedule = True
        try:
            yield
            for end in self.senders.values():
                end.codec_stream.run(end.drain)
            if self.shape_links is not None:
                self.shape_links.drain()
            for each in self.ends:
                each.codec_stream.join()
        finally:
            self.in_schedule = False

    def _begin(self, context: StepContext, counts: Mapping[type, int]) -> None:
        self.step, self.training = context.step, context.training
        self._numbers.clear()
        self._samples.clear()
        self._unplaced.clear()
        for end in self.ends:
            end.messages = 0
        for (instruction, _), receiving in self.receivers.items():
            receiving.to_post = counts.get(instruction, 0)
        for boundary in self.boundaries:
            boundary.begin_step(context.loss_scale)
            boundary.sample_ids.clear()
        self._set_raw_tail(context)

    def _set_raw_tail(self, context: StepContext) -> None:
        for boundary in self.boundaries:
            boundary.forward.uncompressed_tail = context.uncompressed_tail

    def enter_unscheduled(self, context: StepContext) -> None:
        """Prepare a message that no schedule asked for.

        Programs call the engine's instructions by hand, to sample for example. Those of one step and kind are
        counted on, as within a schedule.
        """
        if (context.step, context.training) != (self.step, self.training):
            self._begin(context, {})
        self._set_raw_tail(context)  # a program may have set a mask since

    def on_codec_stream(self, boundary: Boundary, work: Callable[..., Made], *args: Any) -> Made:
        """Run `work` with `args` on the stream of a boundary's codecs; later work waits for it. Return its
        result."""
        codec_stream = next(end.codec_stream for end in self.ends if end.channel.boundary is boundary)
        made = codec_stream.run(functools.partial(work, *args))
        codec_stream.join()
        return made

    def adopt(self) -> None:
        """Follow the codecs of `config`, which are others than in the step before."""
        for boundary in self.boundaries:
            self.on_codec_stream(boundary, boundary.adopt)
        for end in self.ends:
            end.link.renew()

    def load(self, batch: Sequence[Any], buffer_id: int | None) -> None:
        """Take note of the samples in what the data loader returned, if a feedback needs them.

        Args:
            buffer_id: that the batch is loaded into; None where it is not known: then buffers are sent in its
                order.
        """
        source = self.config.in_force.sample_ids
        if source is not None and self.before is None and self.after is not None and self.training:
            ids = source.of(batch)
            if buffer_id is None:
                self._unplaced.append(ids)
            else:
                self._samples[buffer_id] = ids

    def post_receives(self, instruction: type, tensors: Specs | None) -> None:
        """Post receives ahead for messages of this schedule, which have tensors like `tensors`."""
        end = self.receivers[instruction, 0]
        if end.to_post and tensors and end.is_used and end.channel.boundary.number in self.announced:
            message = end.channel.layout_of(tensors, end.channel.message_id(self.step, 0, self.training))
            count, end.to_post = end.to_post, 0
            end.codec_stream.run(lambda: end.link.expect(message.packet.nbytes, count))

    def announce(self, number: int, tensors: Sequence[Tensor] | None, why: str = "") -> None:
        """Record the tensors that a shape message announces for a boundary.

        Args:
            tensors: None or empty: DeepSpeed sends the message itself.
            why: the reason then.
        """
        self.announced.pop(number, None)
        self.left_because.pop(number, None)
        if tensors:
            self.announced[number] = [TensorSpec.of(tensor) for tensor in tensors]
        else:
            self.left_because[number] = why

    def post_receive(self, instruction: type, phase: int, tensors: Sequence[Tensor]) -> None:
        """Post the receive of one message with tensors like `tensors`."""
        end = self.receivers[instruction, phase]
        message = end.channel.layout_of(tensors, end.channel.message_id(self.step, 0, self.training))
        end.link.expect(message.packet.nbytes, 1)

    def dispatch(self, instruction: type, buffer_id: int, tensors: Sequence[Tensor], phase: int = 0) -> None:
        """Send `tensors`, those of a buffer, as one packet."""
        end = self.senders[instruction, phase]
        message_id = self._next_message(end, buffer_id)
        if instruction is schedule.SendActivation and (buffer_id in self._samples or self._unplaced):
            ids = self._samples[buffer_id] if buffer_id in self._samples else self._unplaced.popleft()
            end.channel.boundary.sample_ids[message_id.micro_batch] = ids
        end.codec_stream.run(functools.partial(end.transmit, tensors, message_id), takes=tensors)

    def fetch(self, instruction: type, buffer_id: int, tensors: Specs, phase: int = 0) -> list[Tensor]:
        """Receive the next message, with tensors like `tensors`, for a buffer."""
        end = self.receivers[instruction, phase]
        message_id = self._next_message(end, buffer_id)
        message = end.channel.layout_of(tensors, message_id)
        arrived = end.codec_stream.run(functools.partial(end.take, message, message_id), gives=True)
        if message.ids and self.after:
            self._samples[buffer_id] = end.channel.boundary.sample_ids[message_id.micro_batch]
        return arrived

    def _next_message(self, end: SendingEnd | ReceivingEnd, buffer_id: int) -> MessageId:
        """Count the next message of `end`, with the tensors of a buffer, and return its id."""
        channel, number = end.channel, end.messages
        end.messages += 1
        place = channel.boundary.number, buffer_id
        if channel.direction == "forward":
            self._numbers[place] = number
        else:
            number = self._numbers.pop(place, number)
        return channel.message_id(self.step, number, self.training)

    @property
    def is_sending(self) -> bool:
        """Return whether a send instruction is in progress, so that what it announces will be collected."""
        return self.p2p.sending is not None
