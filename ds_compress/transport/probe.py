"""What a link between two neighbours carries: a few packets on the groups that training uses."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.transport.p2p import Receiver, Sender

PINGS = 5
PING_BYTES = 64
PACKETS = 5
PACKET_BYTES = 1 << 20


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
    device, depth = sender.device, sender.depth
    for end in (sender, receiver):  # a packet must not wait until the one before has been looked at
        end.keep_up_with(PACKETS)
    trips = [trip(sender, receiver, first, PING_BYTES, PING_BYTES) for _ in range(PINGS)]
    arrivals: list[float] = []
    for sends in (first, not first):
        if sends:
            for _ in range(PACKETS):
                sender.send(sender.memory(PACKET_BYTES))
            sender.drain()
        else:
            receiver.expect(PACKET_BYTES, PACKETS)
            arrivals = [_arrival(receiver, PACKET_BYTES, device) for _ in range(PACKETS)]
    for end in (sender, receiver):
        end.keep_up_with(depth)
    seconds = max(arrivals[-1] - arrivals[0], 1e-9)
    return Measured((PACKETS - 1) * PACKET_BYTES / seconds, min(trips) / 2)


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
