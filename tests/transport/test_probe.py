"""What neighbours measure of their link: never more than it carries, however late a process gets to run."""

import math
import random
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from ds_compress.transport import probe as module
from ds_compress.transport.p2p import PeerTimeout, Receiver, Sender, channel_groups
from ds_compress.transport.packet_memory import Packet
from ds_compress.transport.probe import PACKET_BYTES, PING_BYTES, message_rate, probe, probe_neighbours
from tests.support.calls import wrapped
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
ASKS_FOR_NOTHING = Packet(torch.full((8,), -1).view(torch.uint8))


class SimulatedLink:
    """Both ends of one side of a link, and a neighbour that answers at once, on a clock of its own."""

    depth = 1
    groups = (None,)
    device = CPU

    def __init__(self, rate, latency, burst=0.0, delay=lambda: 0.0):
        """`delay`: seconds for which this process does not run when it could go on."""
        self.now = 0.0
        self._rate, self._latency, self._burst, self._delay = rate, latency, burst, delay
        self._free_at = 0.0
        self._arrivals = deque()
        self._memory = {}

    def perf_counter(self):
        self.now += self._delay()
        return self.now

    def drain(self):
        pass

    def memory(self, nbytes):
        return self._memory.setdefault(nbytes, Packet(torch.zeros(nbytes, dtype=torch.uint8)))

    def send(self, packet):
        count, nbytes = packet.memory.view(torch.int64)[:2].tolist()
        if count < 0:
            return
        leaves = max(self.now + self._latency, self._free_at)
        for _ in range(max(count, 1)):
            through = min(self._burst, nbytes)
            self._burst -= through
            leaves += (nbytes - through) / self._rate
            self._arrivals.append((leaves + self._latency, nbytes))
        self._free_at = leaves

    def expect(self, nbytes, count):
        self._arrivals.clear()

    def receive(self, nbytes):
        if not self._arrivals:  # the neighbour's request: it asks for nothing
            return ASKS_FOR_NOTHING
        arrival, size = self._arrivals.popleft()
        assert size == nbytes
        self.now = max(self.now, arrival) + self._delay()
        return self.memory(nbytes)


def measured(monkeypatch, link, *rate):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=link.perf_counter))
    return probe(link, link, True, *rate)


@pytest.mark.parametrize("latency", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e9])
def test_a_quiet_machine_measures_what_a_link_carries(monkeypatch, rate, latency):
    found = measured(monkeypatch, SimulatedLink(rate, latency))
    assert found.latency == pytest.approx(latency + PING_BYTES / rate / 2)
    longest = 256 * PACKET_BYTES / rate
    least = 0.9 if longest > 10 * 2 * latency else longest / (longest + 2 * latency)
    assert least * rate * 0.999 <= found.incoming <= rate * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_never_measures_more_than_a_link_carries(monkeypatch, seed):
    """Less the ping, the longest round took no time: doctor reported 10^8 Gbit/s, and `auto` believed it."""
    draws = random.Random(seed)
    rate = 10.0 ** draws.uniform(6, 11)
    delays = {
        "always": lambda: 0.03,
        "often": lambda: 0.1 * (draws.random() < 0.5),
        "in pings": lambda: 0.03 if draws.random() < 0.02 else draws.expovariate(1e4),
        "any": lambda: draws.expovariate(30),
    }
    for name, delay in delays.items():
        found = measured(monkeypatch, SimulatedLink(rate, draws.choice([0.0, 1e-4, 0.05]), delay=delay))
        assert 0 < found.incoming <= rate * (1 + 1e-9), name
        assert 0 <= found.latency < math.inf


@pytest.mark.extended
def test_one_interruption_is_not_a_slow_link(monkeypatch):
    rate = 1e9
    for interrupted in range(100):
        calls = iter(range(10**9))
        link = SimulatedLink(rate, 1e-4, delay=lambda: 2.0 * (next(calls) == interrupted))
        assert measured(monkeypatch, link).incoming >= 0.9 * rate, interrupted


@pytest.mark.parametrize("packets", [0.5, 3, 7, 20])
def test_a_burst_allowance_is_not_what_a_link_carries(monkeypatch, packets):
    """A link that lets a burst through at first is measured at its sustained rate."""
    rate = 20 * PACKET_BYTES
    link = SimulatedLink(rate, 1e-4, packets * PACKET_BYTES)
    assert measured(monkeypatch, link).incoming <= 1.000001 * rate


class LossyLink(SimulatedLink):
    """A connection has no more than a window of bytes in flight, once it has sent so many bytes."""

    def __init__(self, rate, latency, window, after):
        super().__init__(rate, latency)
        self._lossy = min(rate, window / (2 * latency))
        self._after = after

    def send(self, packet):
        super().send(packet)
        self._after -= sum(nbytes for _, nbytes in self._arrivals)
        self._rate = self._lossy if self._after < 0 else self._rate


def message_measured(monkeypatch, link):
    """Bytes per second, and the seconds that both sides take, one after the other."""
    return measured(monkeypatch, link, message_rate).incoming, 2 * link.now


@pytest.mark.parametrize("latency", [0.0015, 0.04, 0.3])
@pytest.mark.parametrize("mbit", [0.2, 2, 200, 10_000])
def test_a_message_over_a_slow_link_takes_little_time(monkeypatch, mbit, latency):
    """Packets of 1 MiB take 42 s at 0.2 Mbit/s, each, and the stream has three rounds or more."""
    rate = mbit * 1e6 / 8
    found, seconds = message_measured(monkeypatch, SimulatedLink(rate, latency))
    assert 0.5 * rate <= found <= rate or mbit == 10_000
    assert seconds < (10 if mbit < 3 else 15) * (1 if latency < 0.1 else 3)


@pytest.mark.parametrize("megabytes", [3, 9])
def test_a_message_is_long_enough_to_show_lost_packets(monkeypatch, megabytes):
    """One of 2,000 is lost, or one of 6,000: the first 3 or 9 MB arrive as fast as the link is."""
    found, seconds = message_measured(monkeypatch, LossyLink(25e6, 0.04, 80e3, after=megabytes * 1e6))
    assert found == pytest.approx(1e6, rel=0.1) and seconds < 60


def test_one_interruption_ends_no_measurement_of_a_message(monkeypatch):
    """It was taken for the end of a message that was long enough: a short one came next, and most of its time
    was the round trip, so a link had a seventh of its rate, and "auto" chose connections by that."""
    rate = 1e7
    for interrupted in range(18, 48, 2):
        calls = iter(range(10**9))
        link = SimulatedLink(rate, 0.02, delay=lambda: 0.6 * (next(calls) == interrupted))
        assert message_measured(monkeypatch, link)[0] >= 0.7 * rate, interrupted  # 2 s are not measured again


def test_a_near_link_is_not_measured(monkeypatch):
    assert message_measured(monkeypatch, SimulatedLink(1e9, 0.0005)) == (math.inf, pytest.approx(0.012, 0.1))


RATE = 20 * PACKET_BYTES


def tried():
    """What both sides measure of a link with RATE: on a busy machine it is slower, never faster."""
    groups, rank = channel_groups(1), dist.get_rank()
    out, back = (groups[0, direction] for direction in ("forward", "backward")[:: 1 - 2 * rank])
    sender, receiver = Sender(1 - rank, CPU, out), Receiver(1 - rank, CPU, back)
    sender.send = wrapped(sender.send, before=lambda packet: time.sleep(packet.nbytes / RATE))
    found = probe(sender, receiver, first=rank == 0)
    packet = sender.memory(64)
    packet.memory.fill_(7)
    sender.send(packet)  # the channels go on as they were
    receiver.expect(64, 1)
    assert receiver.receive(64).memory.unique().tolist() == [7] and sender.depth == receiver.depth == 1
    sender.drain()
    return found


def test_both_sides_of_a_link_measure_it():
    for found in run_ranks(2, tried):
        assert 0 < found.latency < math.inf and 0 < found.incoming <= RATE


def test_every_rank_measures_its_links():
    found = run_ranks(3, probe_neighbours, CPU, PeerTimeout())
    assert [sorted(links) for links in found] == [[1], [0, 2], [1]]
    assert all(0 < link.incoming < math.inf for links in found for link in links.values())
