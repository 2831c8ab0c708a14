"""What sees the messages of an end of a channel, and the time that each takes."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ds_compress.codec import MessageId
from ds_compress.message.channel import Channel
from ds_compress.message.layout import Encoded


@dataclass(slots=True)
class SeenMessage:
    """A message on its way: what is known of it at one end."""

    channel: Channel
    message_id: MessageId
    tensors: Sequence[Tensor]
    """What is sent, or on the receiving end what has arrived."""
    encoded: Encoded | None = None
    """On the sending end, once there is one."""
    decoded: Sequence[Tensor] | None = None
    """What arrives of `tensors`, where both ends are in one process."""


class Observer:
    """Sees each message of the ends that it is attached to. Its methods do nothing; override what you need.

    An observer changes no message, and waits for no device.
    """

    def before(self, message: SeenMessage) -> None:
        """See a message that will be encoded next."""

    def after(self, message: SeenMessage) -> None:
        """See a message that was handed to the link, or that has been decoded."""

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Return a context around a part of an end's work: to wait for "memory", to "encode", "send" and
        "drain" packets; to "wait" for one, and to "decode" it."""
        return UNTIMED


UNTIMED = nullcontext()


class Observed(Protocol):
    """An end that observers can be attached to."""

    observers: list[Observer]


@contextmanager
def observing(pairs: Sequence[tuple[Observed, Observer]]) -> Iterator[None]:
    """Attach observers to ends, and detach them afterwards."""
    for end, observer in pairs:
        end.observers.append(observer)
    try:
        yield
    finally:
        for end, observer in pairs:
            end.observers.remove(observer)
