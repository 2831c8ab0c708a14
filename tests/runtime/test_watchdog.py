"""What one rank's watchdog concludes about the others; `Job.pass_time` is the only clock, no thread runs."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from ds_compress.errors import CompressionError
from ds_compress.replicas.transfers import Replicas, Started
from ds_compress.runtime import heartbeat, watchdog
from ds_compress.runtime.watchdog import GRACE, Watchdog
from ds_compress.transport.p2p import PeerTimeout
from ds_compress.transport.packet_parts import Parts
from ds_compress.transport.staging import Staged
from tests.runtime.test_heartbeat import RANKS, made

SECONDS = 8.0
LONG = 4 * SECONDS


class Job:
    """Watchdogs of all ranks in one process."""

    def __init__(self, clock, connects=True):
        self.clock, self.ended, store = clock, {}, HashStore()
        self.silent, self.left, self.waiting = set(), set(), set()
        self._calls = {}
        self.ranks = made(lambda rank: Watchdog(store, rank, RANKS, SECONDS))
        for rank, each in enumerate(self.ranks):
            wait = each._connections.wait
            each._connections.wait = lambda seconds, hear, wait=wait: wait(0.0, hear)
            each._look = lambda rank=rank, each=each: setattr(
                each, "_is_waiting", each._is_inside and rank in self.waiting
            )
            each._end_process = lambda rank=rank, each=each: self.ended.setdefault(rank, each._failure)
            if connects:
                each._connections.connect()
                each._is_connected.set()
        self.pass_time(2.0)

    def enter(self, *ranks, call="train_batch", sends_messages=True):
        for rank in ranks:
            self._calls[rank] = self.ranks[rank].watch(call, sends_messages)
            self._calls[rank].__enter__()

    def leave(self, *ranks, error=None):
        for rank in ranks:
            with contextlib.suppress(type(error) if error else ()):
                given = (type(error), error, None) if error else (None, None, None)
                self._calls.pop(rank).__exit__(*given)

    def call(self, *ranks, error=None, sends_messages=True):
        self.enter(*ranks, sends_messages=sends_messages)
        self.leave(*ranks, error=error)

    def pass_time(self, seconds):
        """All ranks but those that are silent, or have left, hear and tell at every tick."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 1.0
            for _ in range(3):  # what one tells, rank 0 passes on
                for rank, each in enumerate(self.ranks):
                    if rank not in self.silent | self.left:
                        each._beat()

    def goes_well(self, seconds=LONG):
        self.pass_time(seconds)
        assert not any(self.failures())

    def silence(self, rank):
        """As a process that is stopped: nothing closes, nothing is said."""
        self.silent.add(rank)

    def end(self, rank):
        """As a process that ends."""
        self.ranks[rank]._at_exit()
        self.kill(rank)

    def kill(self, rank):
        """As a process that is ended."""
        self.ranks[rank]._connections.close()
        self.left.add(rank)

    def failures(self):
        return [each._failure for each in self.ranks]

    def close(self):
        for rank in range(RANKS):
            if rank not in self.left:
                self.ranks[rank]._connections.close()


@pytest.fixture
def new_job(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for module in (heartbeat, watchdog):
        monkeypatch.setattr(module, "time", clock)
    thread = SimpleNamespace(start=lambda: None, join=lambda seconds: None)
    threading = {**vars(watchdog.threading), "Thread": lambda target=None, **_: thread}
    monkeypatch.setattr(watchdog, "threading", SimpleNamespace(**threading))
    monkeypatch.setattr(watchdog, "atexit", SimpleNamespace(register=lambda function: None))
    with contextlib.ExitStack() as stack:

        def make(connects=True):
            job = Job(clock, connects)
            stack.callback(job.close)
            return job

        yield make


@pytest.fixture
def job(new_job):
    job = new_job()
    job.call(*range(RANKS))
    job.pass_time(2.0)
    return job


@pytest.mark.parametrize("failing", range(RANKS))
def test_an_error_of_ours_stops_every_rank(failing, job):
    waiting, between = [rank for rank in range(RANKS) if rank != failing]
    job.enter(waiting)
    job.call(failing, error=CompressionError("boundary 0, forward: rank 9 did not answer"))
    text = f"rank {failing}: boundary 0, forward: rank 9 did not answer"
    job.pass_time(1.0)
    assert job.failures() == [text] * RANKS and not job.ended
    job.pass_time(GRACE + 1)
    assert job.ended == {waiting: text}  # it is inside; the others can raise
    for rank in (failing, between):
        again = job.ranks[rank].watch("train_batch")
        with pytest.raises(CompressionError, match="stopped: rank .: boundary 0"), again:
            pass


def test_one_that_raises_in_time_is_not_ended(job):
    job.enter(1, 2)
    job.call(0, error=CompressionError("no"))
    job.pass_time(1.0)
    assert all("rank 0: no" in failure for failure in job.failures())
    job.leave(1)
    job.pass_time(GRACE + 1)
    assert set(job.ended) == {2}


def test_one_that_is_ended_raises_nothing_beside(job):
    """Others had ended, and a transfer failed as the thread ended the process: the reason was told twice."""
    leaving = []

    def end():
        if not leaving:  # it leaves a moment later, maybe after the next tick
            leaving.append(threads.submit(job.leave, 1))
            assert not wait(leaving, 0.2).done

    job.enter(1)
    job.call(0, error=CompressionError("no"))
    with ThreadPoolExecutor() as threads:
        job.ranks[1]._end_process = end
        job.pass_time(GRACE + 2)
    assert len(leaving) == 1


@pytest.mark.parametrize("pause", [0.0, LONG])
@pytest.mark.parametrize("error, trains", [(ValueError("x"), True), (CompressionError("no space"), False)])
def test_an_error_of_all_ranks_may_be_caught(error, trains, pause, job):
    """An interrupt by hand, a checkpoint that cannot be saved: the program goes on. The data had run out, and
    a script wrote samples for longer than the time-out: its last checkpoint was refused, as no rank had begun
    another call."""
    for _ in range(3):
        job.call(*range(RANKS), error=error, sends_messages=trains)
        job.goes_well(pause)
        job.enter(*range(RANKS), call="eval_batch")
        job.leave(*range(RANKS))
    job.enter(0, 1)  # the other one computes
    job.goes_well()


@pytest.mark.parametrize("done", range(RANKS))
def test_the_last_line_of_a_rank_arrives_though_it_has_not_read_those_of_others(done, job):
    """TCP held it back, and dropped it when the process ended: an error that the rank had caught, and gone on
    after, ended the job."""
    job.call(*range(RANKS), error=ValueError("caught"))
    job.enter(*range(RANKS), call="eval_batch")
    job.leave(done)
    job.end(done)
    job.goes_well()


def test_other_errors_are_failures_when_nothing_follows(job):
    job.enter(0, 2)
    job.call(1, error=ValueError("not\ncaught"))
    job.pass_time(LONG)
    assert all("rank 1 left train_batch: ValueError: not" in failure for failure in job.failures())
    assert set(job.ended) == {0, 2}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("left", range(RANKS))
def test_a_rank_that_left_a_call_is_named_when_the_others_wait_for_it(left, goes_on, job):
    """Its data had run out, the script caught that and evaluated: all waited for the time-out, and
    blamed it for not answering, though it lived."""
    others = [rank for rank in range(RANKS) if rank != left]
    job.enter(*range(RANKS))
    job.leave(left, error=StopIteration())
    if goes_on:
        job.enter(left, call="eval_batch")
    job.waiting.update(others)
    job.pass_time((GRACE if goes_on else SECONDS) + 2)
    text = f"rank {left} left train_batch: StopIteration: its data has run out"
    assert job.failures() == [text] * RANKS
    job.pass_time(GRACE + 1)
    assert set(job.ended) == set(others) | ({left} if goes_on else set())


@pytest.mark.parametrize("pause", [1.0, SECONDS - 1])
@pytest.mark.parametrize("again", range(RANKS))
def test_a_rank_may_try_a_call_again(again, pause, job):
    """Its data came from a disk that failed once, the script caught that: the others were ended while the
    rank waited for the disk, or computed the batch."""
    others = [rank for rank in range(RANKS) if rank != again]
    job.enter(*range(RANKS))
    job.waiting.update(others)
    job.leave(again, error=OSError("read error"))
    job.goes_well(pause)
    job.enter(again)
    job.goes_well()
    job.leave(*range(RANKS))
    job.waiting.clear()
    job.goes_well()


def test_as_long_as_a_rank_computes_others_may_wait_for_it(job):
    """All ranks may leave a call by the same error, each in its time: the program goes on then."""
    job.enter(*range(RANKS))
    job.leave(0, error=ValueError("caught"))
    job.waiting.add(1)
    job.goes_well(LONG / 8)
    job.leave(1, 2, error=ValueError("caught"))
    job.waiting.clear()
    job.call(*range(RANKS))
    job.goes_well()


@pytest.mark.parametrize("reports", [True, False])
def test_a_transfer_that_fails_names_the_reason(reports, job):
    """Of a rank whose peer had ended it said that the connection was closed, and not why."""
    job.enter(*range(RANKS))
    if reports:
        job.leave(1, error=ValueError("a mistake"))
        job.end(1)
        job.pass_time(2.0)
    lost = RuntimeError("[x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [1.2.3.4]:5")
    expected = "stopped: rank 1 left train_batch: ValueError: a mistake" if reports else "Connection closed"
    with pytest.raises((CompressionError, RuntimeError), match=expected):
        job._calls[0].__exit__(RuntimeError, lost, None)
        raise lost


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("killed", range(RANKS))
def test_an_error_is_named_though_the_process_ends_at_once(killed, waited, job):
    """It was reported by the watchdog's thread, which may not have run: "rank 1 is gone"."""
    job.enter(*range(RANKS))
    if waited:
        job.waiting.add(killed)
        job.pass_time(1.0)
    job.leave(killed, error=ValueError("a mistake"))
    job.kill(killed)
    job.pass_time(2.0)
    line = f"rank {killed} left train_batch: ValueError: a mistake"
    assert [failure for rank, failure in enumerate(job.failures()) if rank != killed] == [line, line]


@pytest.mark.parametrize("sends_messages", [True, False])
@pytest.mark.parametrize("silent", range(RANKS))
@pytest.mark.parametrize("is_first", [True, False])
def test_a_silent_rank_that_is_needed(is_first, silent, sends_messages, new_job):
    """In load_checkpoint, the first call of a run, nobody had heard of it yet, so nobody missed it."""
    job, others = new_job(), [rank for rank in range(RANKS) if rank != silent]
    if is_first:
        job.enter(*others, sends_messages=sends_messages)
    else:
        job.call(*range(RANKS))
        job.enter(*range(RANKS), sends_messages=sends_messages)
        job.pass_time(1.0)
    job.silence(silent)
    job.goes_well(SECONDS - 1)
    job.pass_time(6.0)
    assert all(f"rank {silent} was not heard of for 8 s" in job.failures()[rank] for rank in others)
    job.pass_time(GRACE + 1)
    assert set(job.ended) == set(others)


@pytest.mark.parametrize("gone", range(RANKS))
def test_a_rank_that_is_gone_and_needed(gone, job):
    others = [rank for rank in range(RANKS) if rank != gone]
    job.enter(*others)
    job.end(gone)
    job.pass_time(GRACE + 3)
    assert all(f"rank {gone} is gone" in job.failures()[rank] for rank in others)


@pytest.mark.parametrize("how", [Job.silence, Job.end])
@pytest.mark.parametrize("done", range(RANKS))
def test_a_rank_that_is_past_its_last_call_is_not_missed(done, how, job):
    """Ranks end at different times; each reports that it has finished before its thread stops."""
    job.enter(*range(RANKS))
    job.pass_time(1.0)
    job.leave(done)
    if how is Job.silence:
        job.pass_time(1.0)
    how(job, done)
    job.goes_well()


@pytest.mark.parametrize("slow", range(RANKS))
def test_a_rank_may_take_its_time(slow, new_job):
    """To compute, inside a call or between two, while others wait; to begin; to be silent when none waits."""
    others = [rank for rank in range(RANKS) if rank != slow]
    for begins, inside, silent in (
        (True, range(RANKS), False),
        (True, others, False),
        (False, others, False),
        (True, (), True),
        (True, [slow], True),
    ):
        job = new_job()
        if begins:
            job.call(*range(RANKS))
        job.enter(*inside)
        job.pass_time(2.0)
        if silent:
            job.silence(slow)
        job.goes_well()
        assert not job.ended


@pytest.mark.parametrize("by", ["one connection", "several", "host memory", "a collective"])
def test_a_rank_that_waits_for_a_transfer_is_seen(by):
    """Where gradients crossed by one collective, or packets in parts, it was not: an error that its neighbour
    had caught was named after `timeout_s` only."""
    store, arrived, own = HashStore(), torch.zeros(2), torch.ones(2)
    with ThreadPoolExecutor(2) as threads:
        connect = partial(ProcessGroupGloo, store, size=2, timeout=timedelta(seconds=60))
        group, other = threads.map(lambda rank: connect(rank=rank), range(2))
    if by == "a collective":
        work = group.allgather([[*arrived.split(1)]], [own[:1]])
        wait = Started(Replicas(2, 0, (group,)), arrived, [(None, work)]).wait
        answers = [partial(other.allgather, [[*torch.zeros(2).split(1)]], [own[:1]])]
    else:
        size = 2 if by == "one connection" else 1
        works = [group.recv([part], 1, tag) for tag, part in enumerate(arrived.split(size))]
        pending = works[0] if size == 2 else Parts(works)
        if by == "host memory":
            started = Future()
            started.set_result(pending)
            pending = Staged(started, lambda: None)
        wait = partial(PeerTimeout().wait, pending, 1, arrived.device)
        answers = [partial(other.send, [part], 0, tag) for tag, part in enumerate(own.split(size))]
    waiting = Thread(target=wait)
    waiting.start()
    place, before = 0, 1
    for _ in range(300):  # on a busy machine it takes a while to get there
        if place and place == before:
            break
        time.sleep(0.1)
        before, place = place, watchdog._transfer_of(waiting.ident)
    for answer in answers:
        answer().wait()
    waiting.join()
    assert place and place == before and arrived.tolist() == [1, 1]


def test_a_rank_waits_if_two_ticks_find_it_at_one_transfer(job, monkeypatch):
    rank, places = job.ranks[0], iter([5, 5, 0, 0, 6, 7, 7, 7])
    monkeypatch.setattr(watchdog, "_transfer_of", lambda thread: next(places))
    found = []
    job.enter(0)
    for _ in range(7):
        Watchdog._look(rank)
        found.append(rank._is_waiting)
    job.leave(0)  # and its thread waits for what takes no other ranks
    Watchdog._look(rank)
    assert [*found, rank._is_waiting] == [False, True, False, False, False, False, True, False]


def test_nobody_is_late_while_the_machine_sleeps(job):
    job.enter(*range(RANKS))
    for _ in range(4):
        job.clock.now += 1000 * SECONDS
        job.pass_time(1.0)
    assert not any(job.failures())


def test_a_failure_of_any_text_fits_a_line(job):
    job.call(1, error=CompressionError("ä" * 9000))
    job.pass_time(1.0)
    first = job.failures()[0]
    assert first.startswith("rank 1: ää") and len(first.encode()) <= watchdog.LONGEST_FAILURE
    assert job.failures() == [first] * RANKS


ENDS = """
import atexit
from torch.distributed import HashStore
from ds_compress.runtime.watchdog import Watchdog

atexit.register(lambda: print(dog._thread.is_alive()))  # after what the watchdog registers
dog = Watchdog(HashStore(), 0, 1, 8.0)
dog._fail("rank 0: no")
"""


@pytest.mark.extended
def test_no_thread_outlives_the_interpreter():
    """A thread in torch's store when Python ended took the process with it: "terminate called without an
    active exception"."""
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
