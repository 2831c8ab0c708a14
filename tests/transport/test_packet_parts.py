"""Packets that leave in parts over several connections arrive whole and in order, and faults stay named."""

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import distributed as dist

from ds_compress.engine import attach, wiring
from ds_compress.runtime import connections
from ds_compress.transport import packet_parts
from ds_compress.transport.connections import connect
from ds_compress.transport.p2p import PeerTimeout, Receiver, Sender
from tests.support.network import eventually
from tests.support.pipeline import batches, build, ds_config, same_weights
from tests.support.pipeline_kinds import KINDS, train_all
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.transport.streams import install

CPU = torch.device("cpu")
CONNECTIONS = 3
SIZES = [1, 63, 64, 65, 191, 192, 193, 1000, 4096, 5003]


class Recorded:
    """A connection that notes what it is asked to receive."""

    def __init__(self, name, found):
        self.name, self.found = name, found

    def irecv(self, memory, peer):
        self.found.append((self.name, memory))


def started(nbytes, connections):
    """(connection, first byte, bytes) of each transfer of a packet, in the order in which they start."""
    found, packet = [], torch.zeros(nbytes, dtype=torch.uint8)
    packet_parts.irecv(packet, 1, [Recorded(name, found) for name in range(connections)])
    assert {memory.untyped_storage().data_ptr() for _, memory in found} == {packet.data_ptr()}  # in place
    return [(name, memory.storage_offset(), memory.numel()) for name, memory in found]


@pytest.mark.parametrize("nbytes", [packet_parts.WHOLE, packet_parts.WHOLE + 1, 1_000_003])
@pytest.mark.parametrize("connections", [*range(2, 17), 64])
def test_the_parts_of_a_packet_are_the_packet(nbytes, connections):
    found = started(nbytes, connections)
    assert [name for name, *_ in found] == list(
        range(min(connections, -(-nbytes * 16 // packet_parts.WHOLE)))
    )
    ends = [first + size for _, first, size in found]
    assert [first for _, first, _ in found] == [0, *ends[:-1]] and ends[-1] == nbytes
    sizes = [size for *_, size in found]
    assert len(set(sizes[:-1])) == 1 and sizes[0] % packet_parts.ALIGNMENT == 0
    assert 0 < sizes[-1] <= sizes[0] >= packet_parts.WHOLE // 16


def test_a_small_packet_stays_whole():
    assert started(packet_parts.WHOLE - 1, 3) == [(0, 0, packet_parts.WHOLE - 1)]
    assert started(1 << 20, 1) == [(0, 0, 1 << 20)]


def test_the_time_out_is_that_of_all_parts_together(monkeypatch):
    class Slow:
        def wait(self, timeout):
            given.append(timeout)
            now.append(now[-1] + 0.05)

    given, now = [], [0.0]
    monkeypatch.setattr(packet_parts, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    packet_parts.Parts([Slow(), Slow(), Slow()]).wait(timedelta(seconds=0.08))
    assert given == [timedelta(seconds=0.08), timedelta(seconds=0.03), packet_parts.SHORTEST]


def shuffle_parts(groups):
    """Let the transfers of each of `groups` start in a thread of its own, each after a random pause."""
    pauses = random.Random(5)

    def late(isend):
        thread = ThreadPoolExecutor(1)

        def run(pause, *args, **options):
            time.sleep(pause)
            return isend(*args, **options)

        def later(*args, **options):
            pause = 0.002 * pauses.random() if pauses.random() < 0.05 else 0
            work = thread.submit(run, pause, *args, **options)
            return SimpleNamespace(wait=lambda timeout: work.result().wait(timeout))

        return later

    for group in groups:
        group.isend = late(group.isend)


def connected(number):
    """So many connections between two ranks."""
    return connect([((0, 1), number)], seconds=600)[0]


def messages(count, depth, staged):
    """Rank 0 sends packets of many sizes, their parts in any order, and returns how many buffers it keeps and
    what is wrong with the order of the work; rank 1 those that came wrong."""
    problems = install(staged=True).problems if staged else []
    groups, rank = connected(CONNECTIONS), dist.get_rank()
    sizes = [random.Random(n // 10).choice(SIZES) for n in range(count)]  # ten of a size, then another
    content = torch.arange(max(SIZES), dtype=torch.int64)
    wrong = []
    if rank == 0:
        if not staged:
            shuffle_parts(groups)
        sender = Sender(1, CPU, groups, depth=depth)
        for number, size in enumerate(sizes):
            packet = sender.memory(size)
            packet.memory.copy_(content[:size] * 7 + number)
            sender.send(packet)
        sender.drain()
        return len((sender._transport if staged else sender)._free), problems
    receiver = Receiver(0, CPU, groups, depth=depth)
    for number, size in enumerate(sizes):
        if number % 10 == 0:
            receiver.expect(size, 10)
        if not receiver.receive(size).memory.equal((content[:size] * 7 + number).to(torch.uint8)):
            wrong.append(number)
    return wrong


LONG = pytest.param(10_000, 1, False, marks=pytest.mark.extended)


@pytest.mark.parametrize("count, depth, staged", [LONG, (2_000, 4, False), (500, 1, True)])
@pytest.mark.extended(keep=2)
def test_parts_that_arrive_in_any_order_are_put_together(count, depth, staged, monkeypatch):
    """In host memory, too, where the device's cannot be sent."""
    monkeypatch.setattr(packet_parts, "WHOLE", 64)
    (free, problems), wrong = run_ranks(2, messages, count, depth, staged)
    assert problems == wrong == [] and free <= 3 + depth


def sockets():
    """File descriptors of this process's TCP connections."""
    return {each.fd for each in psutil.Process().net_connections("tcp") if each.raddr}


def failing(how, number, staged, folder):
    """Rank 0 writes what it is told when connection `number` is cut, or when rank 1 dies or stops, while the
    parts of a packet are under way."""
    if staged:
        install(staged=True)
    rank, connections = dist.get_rank(), []
    for each in range(CONNECTIONS):
        before = sockets()
        connections += connected(1)
        if each == number:
            opened = sockets() - before
    packet, message = torch.zeros(1 << 22, dtype=torch.uint8), folder / "message"
    if rank == 1:
        connections[number].isend = lambda *args: None
        sent = packet_parts.isend(packet, 0, connections)
        if how == "dies":
            os._exit(0)
        if how == "cut":
            for fd in opened:
                with socket.socket(fileno=os.dup(fd)) as each:
                    each.shutdown(socket.SHUT_RDWR)
        eventually(message.exists, 60)
        del sent
        os._exit(0)
    timeout = PeerTimeout("boundary 0, backward", 2 if how == "stops" else 600)
    receiver = Receiver(1, CPU, connections, timeout)

    def receive():
        receiver.expect(packet.numel(), 3)  # the connection may be gone by now
        receiver.receive(packet.numel())

    (folder / "new").write_text(refusal(receive))
    (folder / "new").rename(message)
    os._exit(0)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("number", range(CONNECTIONS))
@pytest.mark.parametrize(
    "how, said", [("cut", "is gone: "), ("dies", "is gone: "), ("stops", "did not answer within 2 s")]
)
@pytest.mark.extended(keep=1)
def test_a_part_that_never_comes_is_named(how, said, number, staged, tmp_path):
    ended = run_ranks(2, failing, how, number, staged, tmp_path, check=False)
    message = tmp_path / "message"
    assert message.exists(), ended
    assert f"boundary 0, backward: rank 1 {said}" in message.read_text()


LOSSLESS = {direction: {"codec": "lossless"} for direction in ("forward", "backward")}
SEVERAL = {"link": {"connections": CONNECTIONS}}
KINDS_TRIED = ["tensor", "mixed-dynamic", "floats", "mask", "tp-partitioned", "zero-1", "fp16"]


@pytest.mark.parametrize("name", KINDS_TRIED)
@pytest.mark.extended(keep=1)
def test_several_connections_change_no_bit_of_packets_in_two_parts(name):
    """Those in one part: `test_kind`."""
    kind, blocks = KINDS[name], {"one": LOSSLESS, "several": {**LOSSLESS, **SEVERAL}}
    for runs in run_ranks(kind.world_size, train_all, kind, blocks):
        one, several = runs["one"], runs["several"]
        assert same_weights(one.pop("weights"), several.pop("weights"))
        assert one == several


def sockets_of_a_run(stages, replicas, connections):
    """How many sockets are open in the end, ends of channels, and losses; extra packets come later."""
    engine = build(stages, ds_config({"link": {"connections": connections}}, replicas=replicas))
    data = batches(engine.grid.get_data_parallel_id())
    losses = [engine.train_batch(data).item()]
    engine.ds_compress.reconfigure({str(number): LOSSLESS for number in range(stages - 1)})
    losses += [engine.train_batch(data).item() for _ in range(2)]
    assert engine.ds_compress.watchdog._is_connected.wait(60)
    dist.barrier()
    return len(sockets()), len(engine.ds_compress.stage.ends), losses


@pytest.mark.parametrize("stages, replicas", [(3, 2), (4, 1)])
def test_a_connection_takes_one_socket_in_jobs_of_any_size(stages, replicas, monkeypatch):
    """Each was a group of every rank: a socket for each of them."""
    monkeypatch.setattr(packet_parts, "WHOLE", 64)
    ranks = stages * replicas
    one, several = (run_ranks(ranks, sockets_of_a_run, stages, replicas, n) for n in (1, CONNECTIONS))
    for (few, ends, losses), (many, _, same) in zip(one, several):
        assert losses == same and many - few == 2 * ends * (CONNECTIONS - 1)  # extra packets have as many


def over_nccl(block):
    for module in (attach, wiring, connections):
        module.receives_hold_device = lambda device: True
    engine = build(2, ds_config(block))
    engine.ds_compress.begin_step()
    groups = {len(end.link.groups) for end in engine.ds_compress.stage.ends}
    return list(engine.ds_compress.config.notes), groups


@pytest.mark.parametrize("connections", [CONNECTIONS, "auto"])
def test_over_nccl_it_is_ignored_with_one_line(connections):
    said = f"link.connections: {connections} has no effect over NCCL"
    for notes, groups in run_ranks(2, over_nccl, {"link": {"connections": connections}}):
        assert [note for note in notes if said in note] == notes and notes
        assert groups == {1}
