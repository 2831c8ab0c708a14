"""One end of a channel on one rank: codec, link, observers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from ds_compress.codec import MessageId
from ds_compress.message.channel import Channel
from ds_compress.message.layout import MessageLayout
from ds_compress.message.observer import UNTIMED, Observer, SeenMessage
from ds_compress.transport.codec_stream import CodecStream
from ds_compress.transport.p2p import Receiver, Sender
from ds_compress.transport.packet_memory import Packet

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
    observers: list[Observer] = field(default_factory=list)
    """See each message."""

    @property
    def sends(self) -> bool:
        return isinstance(self.link, Sender)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Let observers take the time of a `phase` (`Observer.timed`)."""
        return self._timed(phase) if self.observers else UNTIMED

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.timed(phase))
            yield


@dataclass
class SendingEnd(ChannelEnd[Sender]):
    """The end that encodes."""

    def transmit(self, tensors: Sequence[Tensor], message_id: MessageId) -> None:
        """Encode a message and hand it to the link."""
        message = SeenMessage(self.channel, message_id, tensors)
        for observer in self.observers:
            observer.before(message)
        memory = self._timed_memory if self.observers else self.link.memory
        with self.timed("encode"):
            encoded = self.channel.encode(tensors, message_id, memory)
        with self.timed("send"):
            self.link.send(encoded.packet)
        message.encoded = encoded
        for observer in self.observers:
            observer.after(message)
        if encoded.extra is not None:
            extra = self.extra_link.memory(encoded.extra.nbytes)
            extra.memory.copy_(encoded.extra.memory)
            self.extra_link.send(extra)

    def _timed_memory(self, nbytes: int) -> Packet:
        with self.timed("memory"):
            return self.link.memory(nbytes)

    def drain(self) -> None:
        """Return when everything sent has left this process."""
        with self.timed("drain"):
            self.link.drain()
        self.extra_link.drain()


@dataclass
class ReceivingEnd(ChannelEnd[Receiver]):
    """The end that decodes."""

    to_post: int = 0
    """Messages that the schedule will receive, as long as their size is not known."""
    is_used: bool = True
    """Whether its instruction asked for a message when it ran last."""

    def take(self, message: MessageLayout, message_id: MessageId) -> list[Tensor]:
        """Take a message from the link and decode it."""
        link, nbytes = self.link, message.packet.nbytes
        with self.timed("wait"):
            packet = link.receive(nbytes)
        if self.to_post > 1:  # announced by this one
            link.expect(nbytes, self.to_post - 1)
        self.to_post = 0
        with self.timed("decode"):
            arrived = self.channel.decode(packet, message, message_id, self.extra_link.receive)
        for observer in self.observers:
            observer.after(SeenMessage(self.channel, message_id, arrived))
        return arrived
