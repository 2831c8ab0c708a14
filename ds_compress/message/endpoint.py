"""One end of a channel on one rank, with all that a message passes there."""

from dataclasses import dataclass

from ds_compress.message.channel import Channel
from ds_compress.message.meters import OFF, Probe
from ds_compress.transport.p2p import Receiver, Sender
from ds_compress.transport.streams import Lane


@dataclass
class Endpoint:
    """A channel and the link that it sends on, or receives from."""

    channel: Channel
    link: Sender | Receiver
    second: Sender | Receiver
    """For packets that only some messages have."""

    lane: Lane
    meter: Probe = OFF
    messages: int = 0
    """That passed in the schedule in progress."""

    to_announce: int = 0
    """Messages that the schedule will receive, as long as their size is not known."""

    @property
    def sends(self) -> bool:
        return isinstance(self.link, Sender)
