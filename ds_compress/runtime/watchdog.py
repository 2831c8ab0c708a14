"""Stop every rank of the job, with one message, when one of them fails, falls silent or is cut off.

A thread of each rank reports its progress to rank 0, and that of rank 0 to all others:

    2n - 1   inside its n-th call that takes all ranks      2n   past it

Such calls are train_batch, eval_batch, save_checkpoint and load_checkpoint. A rank may compute in a call,
or between two, for any time: its thread keeps reporting. A rank that others inside a call still need has
failed if it is silent for `link.timeout_s`, or if its connection is closed. A rank that leaves a batch with
an error of ds_compress has failed, as its packets no longer match those of others. After any other error a
program may continue, as when all ranks leave alike, or try the same call again. The rank has failed if its
process ends, or if, while others are inside, it begins no such call for `link.timeout_s`. While all of these
wait for transfers, it has PAUSE seconds, and GRACE once it has begun another call.

A rank that detects a failure reports it to the others. Ranks inside the call have GRACE seconds to raise an
error of their own; one that is blocked in a collective cannot, and its process is ended. Ranks between
calls raise at the start of the next one. A rank whose transfer fails waits a moment for the reason, and
raises that.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.replicas import transfers
from ds_compress.runtime.heartbeat import Connections, Peer
from ds_compress.transport import p2p
from ds_compress.transport.p2p import is_connection_lost

GRACE = 4.0
"""Seconds for an error that is on its way."""

PAUSE = 60.0
"""Seconds for what a program does when it has caught an error, such as to write its weights, or to wait
before it tries again."""

BEATS = 1000
"""Lines that rank 0 reads in a second, about; in larger jobs ranks report less often than once a second."""

TRANSFERS = "/torch/distributed/", os.path.dirname(p2p.__file__), transfers.__file__
"""Parts of the names of files whose functions wait for transfers."""

LONGEST_FAILURE = 2000
"""Longest text of a failure, in bytes; a line is longer."""

logger = logging.getLogger("ds_compress")


class Watchdog:
    """One rank's part, for one engine; its thread starts at once."""

    def __init__(self, keys: Store, rank: int, world_size: int, seconds: float):
        """
        Args:
            keys: in common, for this engine alone.
            seconds: of silence after which a rank that is needed has failed.
        """
        self._rank = rank
        self._seconds = seconds
        self._tick = min(max(1.0, world_size / BEATS), seconds / 4)
        self._connections = Connections(keys, "watchdog", rank, world_size)
        self._process = os.getpid()
        self._is_connected = threading.Event()
        self._is_closed = False
        self._progress = 0
        self._is_inside = False
        self._thread_inside = 0  # the thread that is inside a call
        self._place = 0  # where it waited for a transfer at the last tick
        self._is_waiting = False
        self._error = ""  # with which this rank left its last call, if it may be caught
        self._left = ""  # the same, until it completes a call, or tries the one that it left again
        self._call = ""  # its name
        self._missed = 0.0  # seconds since when a rank has left others that are inside
        self._blocked = 0.0  # seconds since when all of these wait for transfers
        self._is_known = threading.Event()  # the failure is
        self._overdue = 0.0  # seconds since the failure while inside
        self._leaving = threading.Lock()  # held to leave a call, or to end the process: never both
        self._failure = ""  # of the job
        self._last_tick = time.monotonic()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="ds_compress_watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, call: str, sends_messages: bool = True) -> Iterator[None]:
        """Watch a call that takes all ranks.

        Args:
            call: its name.
            sends_messages: whether after an error of ours ranks cannot go on together.

        Raises:
            CompressionError: another rank has failed, before or inside the call.
        """
        if self._is_inside:
            yield
            return
        if self._failure:
            raise CompressionError(f"ds_compress: stopped: {self._failure}")
        self._error = ""
        if call == self._call:
            self._left = ""
        self._call = call
        before = self._progress
        self._thread_inside = threading.get_ident()
        self._progress, self._is_inside = before + 1, True
        try:
            yield
            before, self._left = before + 2, ""
        except BaseException as error:
            if is_connection_lost(error) and self._is_known.wait(min(2 * self._tick, GRACE)):
                raise CompressionError(f"ds_compress: stopped: {self._failure}") from None
            if sends_messages and isinstance(error, CompressionError):
                self._fail(f"rank {self._rank}: {error}")
            else:
                self._error = self._left = f"rank {self._rank} left {call}: {in_one_line(error)}"
            raise
        finally:
            with self._leaving:
                self._progress, self._is_inside, self._is_waiting = before, False, False
            if self._error:  # the process may end at once
                self._report()
            self._connections.wake()  # or before the next tick

    def close(self) -> None:
        """Stop watching: this rank's engine has gone."""
        if os.getpid() != self._process or self._is_closed:
            return
        atexit.unregister(self._at_exit)
        self._end_thread()

    def _end_thread(self) -> None:
        self._is_closed = True
        self._connections.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        if self._error:
            self._fail(self._error)
        if self._is_connected.wait(GRACE):  # the thread may not have run since the last call
            self._report()
        self._end_thread()

    def _fail(self, text: str) -> None:
        """Record that the job has failed; only the first reason counts."""
        if self._failure:
            return
        self._failure = _cut(text)
        self._is_known.set()
        self._report()

    def _report(self) -> None:
        """Report to the others the progress of this rank, or that the job has failed."""
        self._connections.send(self._line)

    def _line(self) -> str:
        if self._failure:
            return f"failed {self._failure}"
        left = f" left {_cut(self._left)}" if self._left else ""
        return f"at {self._progress}{' waits' if self._is_waiting else left}"

    def _run(self) -> None:
        try:
            self._connections.connect()
        except OSError as error:
            addresses = " or ".join(f"{host}, port {port}" for host, port in self._connections.addresses)
            logger.warning(
                f"ds_compress: rank {self._rank} cannot reach rank 0 at {addresses} ({error}): it learns of "
                "failures on other ranks only when its own transfers fail"
            )
            self._connections.close()
            return
        finally:
            self._is_connected.set()
        self._report()
        while not self._is_closed:
            self._beat()
        self._report()
        self._connections.close()

    def _beat(self) -> None:
        """Listen to the others until the next tick; at the tick report, and look who is late."""
        due = self._last_tick + self._tick
        woken = self._connections.wait(due - time.monotonic(), self._hear)
        now = time.monotonic()
        if now >= due:
            self._look()
        if woken or now >= due:
            self._report()
        if now >= due:
            # while the process is stopped, or the machine asleep, nobody is late
            self._judge(min(now - self._last_tick, 2 * self._tick))
            self._last_tick = now

    def _look(self) -> None:
        """Note whether the thread inside a call is where it was at the last tick, waiting for a transfer."""
        place = _transfer_of(self._thread_inside) if self._is_inside else 0
        self._is_waiting = place != 0 and place == self._place
        self._place = place

    def _hear(self, peer: Peer, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        peer.silence = 0.0
        number, _, state = rest.partition(b" ")
        if word == b"at" and number.isdigit():
            peer.progress, peer.has_reported = int(number), True
            peer.is_waiting = state == b"waits"
            if not peer.is_waiting:
                peer.left = state.removeprefix(b"left ").decode(errors="replace")
        elif word == b"failed" and rest:
            self._fail(rest.decode(errors="replace"))

    def _judge(self, seconds: float) -> None:
        """Look whether the job has failed, after so many more seconds."""
        if not self._failure:
            lost = self._find_lost(seconds) or self._find_left(seconds)
            if lost:
                self._fail(lost)
        elif self._is_inside:
            self._overdue += seconds
            if self._overdue > GRACE:
                with self._leaving:
                    if self._is_inside:
                        self._end_process()

    def _find_lost(self, seconds: float) -> str:
        """Return which rank has been silent for too long, and why; empty if none."""
        inside = [peer.progress for peer in self._connections.peers if peer.progress % 2 and not peer.is_gone]
        inside += [self._progress] if self._is_inside else []
        front = max(inside, default=-1)
        for peer in self._connections.peers:
            is_alone = peer.progress == front and inside.count(front) == 1
            if not peer.has_reported or peer.progress > front or is_alone:
                peer.silence = 0.0
                continue
            peer.silence += seconds
            if peer.is_gone and (peer.left or peer.silence > GRACE):
                return peer.left or f"rank {peer.rank} is gone"
            if peer.silence > self._seconds + self._tick:
                return (
                    f"rank {peer.rank} was not heard of for {self._seconds:g} s "
                    "(ds_compress.link.timeout_s): its process is stopped, or its host or the link to it is "
                    "down"
                )
        return ""

    def _find_left(self, seconds: float) -> str:
        """Return the error with which a rank left a call that the others cannot complete; empty if none."""
        known = [(peer.progress, peer.left, peer.is_waiting) for peer in self._connections.peers]
        known.append((self._progress, self._left, self._is_waiting))
        front = max(progress for progress, *_ in known)
        place, left = max([(at, text) for at, text, _ in known if text and at >= front - 1], default=(0, ""))
        others = [(progress, waits) for progress, text, waits in known if not text]
        is_missed = self._rank == 0 and front % 2 and left
        is_stuck = others and all(progress == front and waits for progress, waits in others)
        self._missed = self._missed + seconds if is_missed else 0.0
        self._blocked = self._blocked + seconds if is_missed and is_stuck else 0.0
        most = GRACE if place == front else PAUSE  # in another call than the others, or between two
        return left if self._blocked > most or self._missed > self._seconds else ""

    def _end_process(self) -> None:
        # not through Python's streams: the main thread may hold them
        os.write(2, f"ds_compress: rank {self._rank} stops: {self._failure}\n".encode())
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        os._exit(1)


def _cut(text: str) -> str:
    """Return the first line of `text`, of a length that a line between ranks may have."""
    return text.splitlines()[0].encode(errors="replace")[:LONGEST_FAILURE].decode(errors="ignore")


def _transfer_of(thread: int) -> int:
    """Return a number for the place in the program where `thread` waits for a transfer; 0: it does not."""
    frame = sys._current_frames().get(thread)
    if frame is None or not any(part in frame.f_code.co_filename for part in TRANSFERS):
        return 0
    places = []
    while frame is not None:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places)) or 1
