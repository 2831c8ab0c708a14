"""What neighbours find of their link: no more than it carries, however late they look and whatever passes at
first."""

import math
import time

import torch
from torch import distributed as dist

from ds_compress.transport.p2p import EagerReceiver, EagerSender, channel_groups
from ds_compress.transport.probe import PACKET_BYTES, probe
from tests.support.dist import run_ranks

CPU = torch.device("cpu")
RATE = 20 * PACKET_BYTES  # bytes per second
MUCH = 1.5
"""Of a rate, at most: pings are subtracted, and on a busy machine they take long."""


def ends():
    groups, rank = channel_groups(1), dist.get_rank()
    there, back = (groups[0, direction] for direction in ("forward", "backward"))
    ours, theirs = (there, back) if rank == 0 else (back, there)
    return EagerSender(1 - rank, CPU, ours), EagerReceiver(1 - rank, CPU, theirs)


class Limited:
    """Lets packets leave at `rate` bytes per second, after a `burst` of so many bytes."""

    def __init__(self, sender, rate, burst):
        self._send, self._rate, self._burst = sender.send, rate, burst

    def __call__(self, packet):
        self._burst -= packet.numel()
        if self._burst < 0:
            time.sleep(min(-self._burst, packet.numel()) / self._rate)
        self._send(packet)


def tried(rate, burst=0.0, late=0.0):
    """`late`: seconds until this rank looks at the first packet of a round."""
    sender, receiver = ends()
    if rate:
        sender.send = Limited(sender, rate, burst)
    receive, expect = receiver.receive, receiver.expect

    def expecting(nbytes, count):
        expect(nbytes, count)
        receiver.receive = lambda nbytes: (time.sleep(late), vars(receiver).pop("receive"), receive(nbytes))[
            2
        ]

    if late:
        receiver.expect = expecting
    found = probe(sender, receiver, first=dist.get_rank() == 0)
    vars(receiver).pop("expect", None)
    sender.send(sender.memory(64).fill_(7))  # the channels go on as they were
    receiver.expect(64, 1)
    assert receiver.receive(64).unique().tolist() == [7] and sender.depth == receiver.depth == 1
    sender.drain()
    return found


def test_neighbours_try_their_link():
    first, second = run_ranks(2, tried, RATE)
    assert 0 < first.latency < 10 and second.latency == math.inf
    assert all(0 < found.incoming <= RATE * MUCH for found in (first, second))


def test_a_burst_at_first_is_not_what_a_link_carries():
    found = run_ranks(2, tried, RATE, 3 * PACKET_BYTES)
    assert all(each.incoming <= RATE * MUCH for each in found)


def test_who_looks_late_finds_no_faster_link():
    """It counted from when it had seen the first packet; the others had come meanwhile, in no time, so two
    ranks on a busy machine found 300 GB/s between them."""
    late = 0.2
    for found in run_ranks(2, tried, 0, 0.0, late):
        assert found.incoming <= 256 * PACKET_BYTES / late
