"""What one rank's watchdog makes of the others: failures go round, nobody who owes nothing is suspected."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ds_compress.errors import CompressionError
from ds_compress.runtime import watchdog as module
from ds_compress.runtime.watchdog import FAILURE_KEY, Watchdog

RANKS = 3
SECONDS = 2.0
LONG = 4 * SECONDS


class Job:
    """Watchdogs of all ranks in one process; each step runs in a thread until it is told to go on."""

    def __init__(self, seconds=SECONDS):
        self.store = HashStore()
        self.ranks = [Watchdog(self.store, rank, RANKS, seconds) for rank in range(RANKS)]
        self.ended = {}
        self._inside = {}
        for rank, watchdog in enumerate(self.ranks):
            watchdog._end_process = lambda rank=rank, w=watchdog: self.ended.setdefault(rank, w._failure)

    def enter(self, *ranks, error=None):
        for rank in ranks:
            leave, entered = threading.Event(), threading.Event()

            def step(rank=rank, leave=leave, entered=entered):
                with contextlib.suppress(ValueError), self.ranks[rank].step():
                    entered.set()
                    leave.wait()
                    if error:
                        raise error

            thread = threading.Thread(target=step, daemon=True)
            thread.start()
            assert entered.wait(60)
            self._inside[rank] = leave, thread

    def leave(self, *ranks):
        for rank in ranks:
            leave, thread = self._inside.pop(rank)
            leave.set()
            thread.join(60)

    def step(self, *ranks, error=None):
        self.enter(*ranks, error=error)
        self.leave(*ranks)

    def failures(self):
        return [watchdog._failure for watchdog in self.ranks]

    def all_heard(self):
        peers = [peer for watchdog in self.ranks for peer in watchdog._watch.peers]
        return len(peers) == 2 * (RANKS - 1) and all(peer.heard for peer in peers)

    def silence(self, rank):
        """As of a process that is stopped: nothing closes, nothing is said."""
        watchdog = self.ranks[rank]
        watchdog._tell = watchdog._watch.wake = lambda: None
        watchdog._judge = lambda seconds: None

    def close(self):
        for watchdog in self.ranks:
            watchdog.close()
        self.leave(*self._inside)  # no thread stays: other tests fork this process


@pytest.fixture
def new_job(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(module, "GRACE", 1.0)
    monkeypatch.setattr(module, "_numbers", itertools.repeat(0))  # as if each had a process of its own
    with contextlib.ExitStack() as stack:

        def make(begin=True):
            job = Job()
            stack.callback(job.close)
            if begin:
                job.step(*range(RANKS))
                eventually(job.all_heard)
            return job

        yield make


@pytest.fixture
def job(new_job):
    return new_job()


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 60 s"
        time.sleep(0.02)


def everyone(job, words):
    return lambda: all(words in failure for failure in job.failures())


@pytest.mark.parametrize("failing", range(RANKS))
def test_an_error_of_ours_stops_every_rank(failing, job):
    waiting, between = [rank for rank in range(RANKS) if rank != failing]
    job.enter(waiting)
    job.step(failing, error=CompressionError("boundary 0, forward: rank 9 did not answer"))
    text = f"rank {failing}: boundary 0, forward: rank 9 did not answer"
    eventually(lambda: job.failures() == [text] * RANKS)
    eventually(lambda: job.ended == {waiting: text})  # it stood in the step; the others can raise
    for rank in (failing, between):
        with pytest.raises(CompressionError, match="stopped: rank .: boundary 0"), job.ranks[rank].step():
            pass
    assert job.store.get(FAILURE_KEY).decode() == text


def test_one_that_raises_in_time_is_not_ended(job):
    job.enter(1, 2)
    job.step(0, error=CompressionError("no"))
    eventually(everyone(job, "rank 0: no"))
    job.leave(1)
    eventually(lambda: 2 in job.ended)
    assert 1 not in job.ended


def test_other_errors_may_be_caught(job):
    """A StopIteration, an interrupt by hand: the program goes on."""
    for _ in range(3):
        job.step(*range(RANKS), error=ValueError("caught"))
        job.step(*range(RANKS))
    time.sleep(LONG)
    assert not any(job.failures())


def test_other_errors_are_failures_when_nothing_follows(job):
    job.enter(0, 2)
    job.step(1, error=ValueError("not\ncaught"))
    eventually(everyone(job, "rank 1: ValueError: not"))
    eventually(lambda: set(job.ended) == {0, 2})


def test_other_errors_are_failures_when_the_process_ends(job):
    job.enter(0, 2)
    job.ranks[1]._seconds = 1e6
    job.step(1, error=ValueError("not caught"))
    job.ranks[1]._at_exit()
    eventually(everyone(job, "rank 1: ValueError: not caught"))


@pytest.mark.parametrize("silent", range(RANKS))
def test_a_silent_rank_that_is_needed(silent, job):
    job.enter(*range(RANKS))
    job.silence(silent)
    others = [rank for rank in range(RANKS) if rank != silent]
    eventually(lambda: all(f"rank {silent} was not heard of for 2 s" in job.failures()[r] for r in others))
    eventually(lambda: set(job.ended) == set(others))


@pytest.mark.parametrize("gone", range(RANKS))
def test_a_rank_that_is_gone_and_needed(gone, job):
    others = [rank for rank in range(RANKS) if rank != gone]
    job.enter(*others)
    job.ranks[gone].close()
    eventually(lambda: all(f"rank {gone} is gone" in job.failures()[rank] for rank in others))


def test_a_rank_that_is_through_is_not_missed(new_job):
    """At the end of a run ranks end when they like, while others still write or evaluate."""
    jobs = {(done, how): new_job() for done in range(RANKS) for how in ("silence", "close")}
    for (done, _), job in jobs.items():
        job.enter(*range(RANKS))
        job.leave(done)
    time.sleep(SECONDS)  # it has said so
    for (done, how), job in jobs.items():
        job.silence(done) if how == "silence" else job.ranks[done].close()
    time.sleep(LONG)
    assert not any(failure for job in jobs.values() for failure in job.failures())


def test_a_process_that_ends_at_once_has_said_that_it_is_through(new_job):
    """On a busy machine its thread does not come to it any more: the others were told that it is gone, and
    stopped in the last step."""
    jobs = [(done, new_job()) for done in range(RANKS)]
    for done, job in jobs:
        job.enter(*range(RANKS))
        watchdog = job.ranks[done]
        watchdog._watch.wake, watchdog._tick = lambda: None, 1e6
        time.sleep(SECONDS / 2)
        job.leave(done)
        watchdog._at_exit()
        for peer in watchdog._watch.peers:
            peer.connection.close()
    time.sleep(LONG)
    assert not any(failure for _, job in jobs for failure in job.failures())


def test_a_rank_may_take_its_time(new_job):
    """To compute, in a step or between two, while others wait; to begin; to sleep when nobody waits."""
    jobs = []
    for slow in range(RANKS):
        others = [rank for rank in range(RANKS) if rank != slow]
        for begin, inside, silent in (
            (True, range(RANKS), False),
            (True, others, False),
            (False, others, False),
            (True, (), True),
            (True, [slow], True),
        ):
            job = new_job(begin)
            job.enter(*inside)
            jobs.append((job, slow if silent else None))
    time.sleep(SECONDS)  # all know
    for job, silent in jobs:
        if silent is not None:
            job.silence(silent)
    time.sleep(LONG)
    jobs = [job for job, _ in jobs]
    assert not any(failure for job in jobs for failure in job.failures())
    assert not any(job.ended for job in jobs)


def test_nobody_is_late_while_the_machine_sleeps(job, monkeypatch):
    job.enter(*range(RANKS))
    slept = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + slept))
    for _ in range(4):
        slept += 1000 * SECONDS
        time.sleep(SECONDS)
    assert not any(job.failures())


def test_strangers_are_turned_away(job):
    job.step(*range(RANKS))
    watch = job.ranks[0]._watch
    messages = [
        b"hello 0000 1\nfailed no\n",
        b"failed no\n",
        b"\n",
        b"hello\n",
        b"x" * 10_000,
        b"\xff\n",
        b"",
    ]
    for message in [*messages, f"hello {watch._token} 7\nfailed no\n".encode()]:
        with socket.create_connection(("127.0.0.1", watch.port), 60) as stranger:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(message)
                if message:
                    assert stranger.recv(1) in (b"", b"a")  # closed, or told how far rank 0 is before that
    eventually(lambda: all(peer.rank is not None for peer in watch.peers))
    job.step(*range(RANKS))
    assert not any(job.failures()) and len(watch.peers) == RANKS - 1


def test_training_goes_on_where_rank_0_cannot_be_reached(new_job, caplog):
    job = new_job(begin=False)
    job.ranks[2]._watch.hosts = ["127.0.0.1"]
    job.ranks[2]._watch.port = 1
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            job.step(*range(RANKS))
        eventually(lambda: "rank 2 does not reach rank 0 at 127.0.0.1, port 1" in caplog.text)
    assert not any(job.failures())
