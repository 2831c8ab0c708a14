"""Measure what a link between two neighbours carries.

The receiving side asks for packets and divides their bytes by the seconds since it asked. No byte leaves
before it is asked for, so whatever delays a process makes the result lower, never higher than the link.
Nothing is subtracted: a difference of two times can be near zero on a busy machine.

Rounds double until one takes so many round trips that the one it waits for hardly counts, and so long that a
burst allowance of the link is used up. Two more rounds follow, and the shorter counts: an interruption is not
a slow link.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from ds_compress.transport.p2p import (
    PeerTimeout,
    Receiver,
    Sender,
    channel_groups,
)
from ds_compress.transport.packet_parts import WHOLE

PINGS = 5
PING_BYTES = 64
AHEAD = 5
"""Depth of the ends while they are probed: a packet must not wait until the one before was handled."""
PACKET_BYTES = 1 << 20
MOST = 256
"""Packets of the longest round."""
SECONDS = 0.05
"""The shortest round that counts."""
ROUND_TRIPS = 10
"""Pings in the shortest round that counts: the one that it waits for lowers the result by a tenth at most."""
NEAR = 2e-3
"""Seconds of a round trip in which a TCP connection recovers from a lost packet at little cost."""
SEGMENT = 1448
"""Bytes of a TCP packet."""
LONG = 2.0
"""Seconds of a message after which no longer one is tried."""
MATHIS = 1.22
"""Packets in flight on a connection that loses one of n: this times the root of n (Mathis et al., 1997)."""
MOST_BYTES = 32 << 20
"""Bytes of the longest message."""


@dataclass(frozen=True)
class LinkMeasurement:
    """A link as seen from one of its sides."""

    incoming: float
    """Bytes per second from the neighbour."""
    latency: float
    """Seconds one way, half of the shortest round trip."""


def probe(
    sender: Sender,
    receiver: Receiver,
    first: bool,
    rate: Callable[[Sender, Receiver, float], float] | None = None,
) -> LinkMeasurement:
    """Measure the link to a neighbour; both sides call it between two batches.

    Args:
        sender: the end of a channel to the neighbour.
        receiver: the end of a channel from the neighbour.
        first: True on one of the two sides, which asks first.
        rate: measures bytes per second, from the ends and the round trip; None: by a stream of packets.
    """
    depth = sender.depth
    sender.depth = receiver.depth = AHEAD
    latency, incoming = math.inf, 0.0
    for asks in (first, not first):
        if asks:
            ping = min(_round(sender, receiver, 0) for _ in range(1 + PINGS))  # the first one may connect
            latency, incoming = ping / 2, (rate or _incoming)(sender, receiver, ping)
            _ask(sender, -1)
            sender.drain()
        else:
            _answer(sender, receiver)
    sender.depth = receiver.depth = depth
    return LinkMeasurement(incoming, latency)


def probe_neighbours(
    device: torch.device, timeout: PeerTimeout, distances: Sequence[int] = (1,)
) -> dict[int, LinkMeasurement]:
    """Measure the links of this rank to the ranks before and after it, by rank; every rank calls it.

    One link is measured at a time, so that none slows another.

    Args:
        distances: between the two ranks of a link, for each kind of links.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [(one, one + far) for far in sorted(set(distances)) for one in range(world - far)]
    groups = channel_groups(len(pairs), seconds=timeout.seconds)
    found = {}
    for number, pair in enumerate(pairs):
        if rank in pair:
            first = rank == pair[0]
            peer = pair[1] if first else pair[0]
            out, back = (groups[number % 2, use] for use in ("forward", "backward")[:: 1 if first else -1])
            sender = Sender(peer, device, out, timeout)
            receiver = Receiver(peer, device, back, timeout)
            found[peer] = probe(sender, receiver, first)
        dist.barrier()
    return found


def message_rate(sender: Sender, receiver: Receiver, ping: float) -> float:
    """Measure the bytes per second of a message; `ping` is the round trip in seconds. Infinite below NEAR.

    The message is so long that lost packets show: a connection is as fast as the link until it loses the
    first. Its length doubles until it has as many packets as come to one lost, if losses are what limits the
    rate (MATHIS), or until it takes LONG. On a slow link few packets are in flight, so that is soon.
    """
    if ping < NEAR:
        return math.inf
    receiver.depth = 1  # it keeps memory for all that may be posted
    nbytes = WHOLE

    def is_last(seconds: float) -> bool:
        in_flight = nbytes / seconds * ping / SEGMENT / len(receiver.groups)  # of one connection
        shown = nbytes / SEGMENT / len(receiver.groups) >= (in_flight / MATHIS) ** 2
        return seconds >= max(LONG if not shown else LONG / 4, 2 * ping) or nbytes == MOST_BYTES

    while True:
        seconds = _round(sender, receiver, 1, nbytes)
        if seconds < LONG and is_last(seconds):  # an interruption is not a slow link
            seconds = min(seconds, _round(sender, receiver, 1, nbytes))
        if is_last(seconds):
            break
        nbytes *= 2
    return nbytes / seconds


def _incoming(sender: Sender, receiver: Receiver, ping: float) -> float:
    """Measure the bandwidth from the other side in bytes per second; `ping` is the round trip in seconds."""
    enough = max(SECONDS, ROUND_TRIPS * ping)
    count = 1
    while True:
        if count == MOST or _round(sender, receiver, count) >= enough:
            seconds = min(_round(sender, receiver, count) for _ in range(2))
            if count == MOST or seconds >= enough:
                return count * PACKET_BYTES / seconds
        count *= 2


def _round(sender: Sender, receiver: Receiver, count: int, nbytes: int = PACKET_BYTES) -> float:
    """Measure the seconds from the request for `count` packets until the last is there; 0: a ping."""
    nbytes, packets = (nbytes, count) if count else (PING_BYTES, 1)
    receiver.expect(nbytes, packets)
    started = time.perf_counter()
    _ask(sender, count, nbytes)
    for _ in range(packets):
        receiver.receive(nbytes)
        if receiver.device.type != "cpu":
            torch.get_device_module(receiver.device).synchronize(receiver.device)
    return time.perf_counter() - started


def _ask(sender: Sender, count: int, nbytes: int = PING_BYTES) -> None:
    packet = sender.memory(PING_BYTES)
    packet.memory.view(torch.int64).fill_(nbytes)[0] = count
    sender.send(packet)


def _answer(sender: Sender, receiver: Receiver) -> None:
    """Send as many packets as the other side requests, until it requests a negative number."""
    while (request := receiver.receive(PING_BYTES).memory.view(torch.int64).tolist())[0] >= 0:
        for _ in range(request[0] or 1):
            sender.send(sender.memory(request[1]))
        sender.drain()
