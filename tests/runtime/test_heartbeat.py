"""The sockets and threads of heartbeats: nothing that a stranger sends to rank 0 ends a job."""

import contextlib
import logging
import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import HashStore

from ds_compress.runtime import heartbeat
from ds_compress.runtime.heartbeat import HELLO_SECONDS, LONGEST_HELLO, MOST_STRANGERS, Connections
from ds_compress.runtime.watchdog import Watchdog
from ds_compress.transport import connections as transport
from tests.support.network import MESSAGES, eventually, flood

RANKS = 3
FOREVER = 1e6
"""Seconds: no clock has a say here."""


def made(create):
    """What `create(rank)` gives on all ranks, which wait for each other."""
    with ThreadPoolExecutor(RANKS) as starting:
        return [each.result() for each in [starting.submit(create, rank) for rank in range(RANKS)]]


@pytest.fixture
def start(monkeypatch):
    """Starts the watchdogs of a job."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with contextlib.ExitStack() as stack:

        def job(tick=0.1):
            store = HashStore()
            ranks = made(lambda rank: Watchdog(store, rank, RANKS, FOREVER))
            for each in ranks:  # no thread stays: other tests fork this process
                each._tick = tick
                stack.callback(each.close)
            return ranks

        yield job


def port_of(ranks):
    ((host, port),) = ranks[0]._connections.addresses
    assert host == "127.0.0.1"
    return port


def have_heard(ranks, progress):
    """Whether all ranks know of each other how far they are, as far as they tell."""
    peers = [peer for each in ranks for peer in each._connections.peers]
    return len(peers) == 2 * (RANKS - 1) and all(peer.progress == progress for peer in peers)


def call(ranks):
    for each in ranks:
        with each.watch("train_batch"):
            pass


def goes_on(ranks, calls):
    for number in range(calls):
        call(ranks)
        eventually(lambda: have_heard(ranks, ranks[0]._progress))
        assert ranks[0]._progress >= 2 * (number + 1)
    assert not any(each._failure for each in ranks) and all(each._thread.is_alive() for each in ranks)


@pytest.mark.parametrize("name", MESSAGES)
def test_strangers_are_told_nothing(start, name, monkeypatch):
    """`hello \\xff 1`, which is not ASCII, once ended the thread of rank 0, and all ranks stopped."""
    ranks = start()
    monkeypatch.setattr(heartbeat, "HELLO_SECONDS", FOREVER)  # a long line is not kept until then
    with socket.create_connection(("127.0.0.1", port_of(ranks)), 60) as stranger:
        stranger.settimeout(60)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(MESSAGES[name])
            if b"\n" in MESSAGES[name] or len(MESSAGES[name]) > LONGEST_HELLO:
                assert stranger.recv(1) == b""  # closed
    goes_on(ranks, 1)
    eventually(lambda: not ranks[0]._connections._strangers)


def test_who_has_the_token_must_be_a_rank(start):
    ranks = start()
    for rank in (b"0", b"3", b"-1", b"7" * 50, b"\xb2", b"1.0"):
        with socket.create_connection(("127.0.0.1", port_of(ranks)), 60) as stranger:
            stranger.sendall(b"hello %s %s\nfailed no\n" % (ranks[0]._connections._token, rank))
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    goes_on(ranks, 1)


def test_a_flood_of_connections(start):
    """3,000 were all kept; 120 s later the job had not gone on."""
    ranks = start()
    with flood(port_of(ranks)):
        goes_on(ranks, 2)
        eventually(lambda: len(ranks[0]._connections._strangers) <= MOST_STRANGERS)
    goes_on(ranks, 2)


def test_ranks_that_start_in_a_flood(start, monkeypatch):
    """Its backlog and strangers are full when they connect: who is dropped connects again."""
    monkeypatch.setattr(heartbeat, "MOST_STRANGERS", 1)
    connected = Connections.connect
    with contextlib.ExitStack() as stack:

        def connect(self):
            if self.rank == 1:
                stack.enter_context(flood(self.addresses[0][1], 300))
            connected(self)
            if self.rank == 1:
                stack.enter_context(flood(self.addresses[0][1], 100))

        monkeypatch.setattr(Connections, "connect", connect)
        ranks = start()
        goes_on(ranks, 2)


def test_a_rank_that_rank_0_dropped_unheard_connects_again(start, monkeypatch):
    admit, dropped = Connections._admit, []

    def drop(self, peer, line):
        if line.endswith(b" 1") and len(dropped) < 3:
            dropped.append(peer)
            if len(dropped) == 2:  # one that it knew already
                admit(self, peer, line)
            peer.is_gone = True
        else:
            admit(self, peer, line)

    monkeypatch.setattr(Connections, "_admit", drop)
    ranks = start()
    goes_on(ranks, 2)
    assert len(dropped) == 3


def test_a_rank_that_ends_is_missed_though_a_process_that_it_forked_goes_on(start):
    """A worker of its data loader held the connection open: that the rank was killed showed after `timeout_s`
    only."""
    ranks = start()
    call(ranks)
    eventually(lambda: have_heard(ranks, 2))
    until, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    try:
        ranks[1].close()
        eventually(lambda: [peer.is_gone for peer in ranks[0]._connections.peers if peer.rank == 1] == [True])
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(until)


def test_strangers_have_little_time(monkeypatch):
    """However slowly they send, a byte at a time."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = HashStore()
    rank_0, *others = made(lambda rank: Connections(store, "key", rank, RANKS))
    with socket.create_connection(rank_0.addresses[0], 60) as stranger, contextlib.ExitStack() as stack:
        for each in (rank_0, *others):
            stack.callback(each.close)
        eventually(lambda: rank_0.wait(0.1, None) or rank_0._strangers)
        while clock.now <= HELLO_SECONDS:
            assert len(rank_0._strangers) == 1
            stranger.send(b"h")
            clock.now += 1.0
            rank_0.wait(0.0, None)
        rank_0.wait(0.0, None)
        assert not rank_0._strangers and stranger.recv(1) == b""


def test_an_error_of_ours_in_a_line_does_not_end_the_thread(start, monkeypatch, caplog):
    ranks = start()
    goes_on(ranks, 1)
    hear, broken = Watchdog._hear, []

    def breaks(self, peer, line):
        if self._rank == 0 and not broken:
            broken.append(peer.rank)
            raise TypeError("a mistake of ours")
        hear(self, peer, line)

    monkeypatch.setattr(Watchdog, "_hear", breaks)
    call(ranks)
    eventually(lambda: "cannot read a heartbeat of rank" in caplog.text)
    assert all(each._thread.is_alive() for each in ranks)


@pytest.mark.parametrize(
    "known, listens_at, told",
    [
        ([["127.0.0.1"], ["127.0.0.1"]], ["127.0.0.1"], ["127.0.0.1"]),
        # each finds another address for the name of rank 0; the first that is its own counts
        ([["127.0.1.1"], ["192.0.2.1", "127.0.0.1"]], ["127.0.1.1", "127.0.0.1"], ["127.0.1.1", "127.0.0.1"]),
        # an address that others translate, or none at all
        ([["127.0.0.1"], ["192.0.2.1"]], None, ["127.0.0.1", "192.0.2.1", socket.gethostname()]),
        ([[], []], None, [socket.gethostname()]),
    ],
)
def test_rank_0_listens_where_training_reaches_it(known, listens_at, told):
    servers, addresses = heartbeat._listen(known)
    with contextlib.ExitStack() as stack:
        bound, ports, *_ = zip(*(stack.enter_context(server).getsockname() for server in servers))
    assert [*bound] == listens_at if listens_at else bound in (("::",), ("0.0.0.0",))
    assert [host for host, _ in addresses] == told
    assert {port for _, port in addresses} == {*ports}


def test_training_goes_on_where_rank_0_cannot_be_reached(start, monkeypatch, caplog):
    connect = Connections.connect

    def unreachable(self):
        self.addresses = [("127.0.0.1", 1)] if self.rank == 2 else self.addresses
        connect(self)

    monkeypatch.setattr(Connections, "connect", unreachable)
    with caplog.at_level(logging.WARNING):
        ranks = start()
        for _ in range(3):
            call(ranks)
        eventually(lambda: "rank 2 cannot reach rank 0 at 127.0.0.1, port 1 (" in caplog.text)
    assert not any(each._failure for each in ranks)


@pytest.fixture
def limit_files():
    """Sets how many files this process may open beside those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(more):
        soft = psutil.Process().num_fds() + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def room():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - psutil.Process().num_fds()


class Known(HashStore):
    """A store in which all other ranks have said where they find rank 0."""

    def get(self, key):
        return b'["127.0.0.1"]'


def test_rank_0_has_room_for_the_heartbeats_of_all_ranks_beside_other_connections(limit_files):
    """Of 300 ranks at a limit of 200 files it heard 177, in silence, and could open no file any more."""
    limit_files(100)
    heartbeats = Connections(Known(), "watchdog", 0, 300)
    with contextlib.closing(heartbeats):
        assert room() >= 299 + transport.SPARE
        transport.make_room(50)  # before any of them has connected
        assert room() >= 299 + 50 + transport.SPARE
        heartbeats.peers = [SimpleNamespace(connection=socket.socket()) for _ in range(299)]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        transport.make_room(50)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit  # they are counted once


def test_rank_0_says_if_it_may_not_have_room(monkeypatch, caplog):
    most = psutil.Process().num_fds() + 100 + transport.SPARE
    limits = {"getrlimit": lambda _: (most, most), "setrlimit": lambda *_: None}
    monkeypatch.setattr(transport, "resource", SimpleNamespace(**{**vars(resource), **limits}))
    with contextlib.closing(Connections(Known(), "watchdog", 0, 20)):
        assert not caplog.records
    with contextlib.closing(Connections(Known(), "watchdog", 0, 300)):
        (record,) = caplog.records
    assert "too few files to hear of failures of all 300 ranks" in record.getMessage()
