"""One end of a channel on one rank: codec, link, meter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from ds_compress.codec import MessageId
from ds_compress.message.channel import Channel
from ds_compress.message.layout import MessageLayout
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.transport.p2p import Receiver, Sender
from ds_compress.transport.streams import CodecStream

Link = TypeVar("Link", Sender, Receiver)


@dataclass
class ChannelEnd(Generic[Link]):
    """A channel and the link that it sends on, or receives from."""

    channel: Channel
    link: Link
    extra_link: Link
    """For extra packets of payloads without a fixed size."""
    codec_stream: CodecStream
    messages: int = 0
    """Number of messages so far in the current schedule."""

    @property
    def sends(self) -> bool:
        return isinstance(self.link, Sender)


@dataclass
class SendingEnd(ChannelEnd[Sender]):
    meter: SendingMeter | None = None
    """Meter of the current step, None if it is not measured."""
    watch: Callable[[Channel, Sequence[Tensor], MessageId], None] | None = None
    """Sees each message before it is encoded, where settings depend on messages; it waits for no device."""

    def transmit(self, tensors: Sequence[Tensor], message_id: MessageId) -> None:
        """Encode a message and hand it to the link."""
        link, meter = self.link, self.meter
        if self.watch is not None:
            self.watch(self.channel, tensors, message_id)
        if meter is None:
            packet, extra, _ = self.channel.encode(tensors, message_id, link.memory)
            link.send(packet)
        else:
            packet, extra, _ = meter.encode(self.channel, tensors, message_id, link.memory)
            meter.send(link, packet)
        if extra is not None:
            self.extra_link.send(self.extra_link.memory(extra.numel()).copy_(extra))

    def drain(self) -> None:
        """Return when everything sent has left this process."""
        if self.meter is None:
            self.link.drain()
        else:
            self.meter.drain(self.link)
        self.extra_link.drain()


@dataclass
class ReceivingEnd(ChannelEnd[Receiver]):
    meter: ReceivingMeter | None = None
    """Meter of the current step, None if it is not measured."""
    to_post: int = 0
    """Messages that the schedule will receive, as long as their size is not known."""

    def take(self, message: MessageLayout, message_id: MessageId) -> list[Tensor]:
        """Take a message from the link and decode it."""
        link, meter, nbytes = self.link, self.meter, message.packet.nbytes
        packet = link.receive(nbytes) if meter is None else meter.receive(link, nbytes)
        if self.to_post > 1:  # announced by this one
            link.expect(nbytes, self.to_post - 1)
        self.to_post = 0
        if meter is None:
            return self.channel.decode(packet, message, message_id, self.extra_link.receive)
        return meter.decode(self.channel, packet, message, message_id, self.extra_link.receive)
