"""What a link between two neighbours carries: packets on the groups that training uses.

The side that receives asks for packets and counts the time from there, less that of a ping: who looked at
the clock when the first packet had come, and was late to do so, found the others there already, and the link
faster than it is. Each round has twice the packets of the one before, until one takes long enough to say what
a link carries that lets a burst pass at first, twice; the shorter of these two counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.transport.p2p import Receiver, Sender

PINGS = 5
PING_BYTES = 64
AHEAD = 5
"""Packets that are received ahead."""
PACKET_BYTES = 1 << 20
MOST = 256
"""Packets of a round."""
SECONDS = 0.05
"""What a round takes that says enough; at least four times as long as a ping, where windows have to open."""


@dataclass(frozen=True)
class Measured:
    """As seen from one side."""

    incoming: float
    """Bytes per second."""
    latency: float
    """Seconds one way, half of the shortest way there and back; endless on the side that answered."""


def probe(sender: Sender, receiver: Receiver, first: bool) -> Measured:
    """Measure the link to the neighbour that both ends belong to; both sides call it between two batches.

    Args:
        first: True on one of the two sides, which sends first.
    """
    depth = sender.depth
    for end in (sender, receiver):  # a packet must not wait until the one before has been looked at
        end.keep_up_with(AHEAD)
    pings, incoming = float("inf"), 0.0
    for asks in (first, not first):
        trips = [trip(sender, receiver, asks, PING_BYTES, PING_BYTES) for _ in range(PINGS)]
        if asks:
            pings = min(trips)
            incoming = _incoming(sender, receiver, pings)
        else:
            _answer(sender, receiver)
    for end in (sender, receiver):
        end.keep_up_with(depth)
    return Measured(incoming, pings / 2 if first else float("inf"))


def _incoming(sender: Sender, receiver: Receiver, ping: float) -> float:
    """Bytes per second that come from the other side, which answers; `ping`: seconds there and back."""

    def took(count: int) -> float:
        receiver.expect(PACKET_BYTES, count)
        started = time.perf_counter()
        _ask(sender, count)
        arrived = [_arrival(receiver, PACKET_BYTES, sender.device) for _ in range(count)][-1]
        return arrived - started - ping

    took(1)
    count, seconds, enough = 1, 0.0, max(SECONDS, 4 * ping)
    while seconds < enough and count < MOST:
        count *= 2
        seconds = took(count)
        if seconds >= enough:  # once more: a rank that was interrupted is no slow link
            seconds = min(seconds, took(count))
    _ask(sender, 0)
    sender.drain()
    return count * PACKET_BYTES / max(seconds, 1e-9)


def _ask(sender: Sender, count: int) -> None:
    packet = sender.memory(PING_BYTES)
    packet.view(torch.int64).fill_(count)
    sender.send(packet)


def _answer(sender: Sender, receiver: Receiver) -> None:
    """Send as many packets as the other side asks for, until these are none."""
    while count := int(receiver.receive(PING_BYTES).view(torch.int64)[0]):
        for _ in range(count):
            sender.send(sender.memory(PACKET_BYTES))
        sender.drain()


def trip(sender: Sender, receiver: Receiver, first: bool, there: int, back: int) -> float:
    """Seconds that a packet of `there` bytes and the answer of `back` bytes take, as the first side sees it;
    endless on the other, which may have come late."""
    size, answer = (there, back) if first else (back, there)
    steps: list[Callable[[], object]] = [
        lambda: sender.send(sender.memory(size)),
        lambda: _arrival(receiver, answer, sender.device),
    ]
    started = time.perf_counter()
    for step in steps if first else reversed(steps):
        step()
    sender.drain()
    return time.perf_counter() - started if first else float("inf")


def _arrival(receiver: Receiver, nbytes: int, device: torch.device) -> float:
    """When the next packet is there, by the host's clock."""
    _settle(receiver.receive(nbytes))
    return time.perf_counter()


def _settle(packet: Tensor) -> None:
    """Return when the device has `packet`."""
    if packet.device.type != "cpu":
        torch.get_device_module(packet.device).synchronize(packet.device)
