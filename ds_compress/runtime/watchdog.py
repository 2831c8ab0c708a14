"""Stop every rank of the job, with one message, when one of them fails, falls silent or is cut off.

A thread of each rank reports its progress to rank 0, and that of rank 0 to all others:

    2n - 1   inside its n-th call that takes all ranks      2n   past it

Such calls are train_batch, eval_batch, save_checkpoint and load_checkpoint. A rank may compute in a call,
or between two, for any time: its thread keeps reporting. A rank that others inside a call still need has
failed if it is silent for `link.timeout_s`, or if its connection is closed. A rank that leaves a batch with
an error of ds_compress has failed, as its packets no longer match those of others. After any other error a
program may continue; the rank has failed if its process ends, or begins no other call for `link.timeout_s`.

A rank that detects a failure reports it to the others. Ranks inside the call have GRACE seconds to raise an
error of their own; one that is blocked in a collective cannot, and its process is ended. Ranks between
calls raise at the start of the next one.
"""

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.runtime.heartbeat import Connections, Peer

GRACE = 4.0
"""Seconds for an error that is on its way."""

BEATS = 1000
"""Lines that rank 0 reads in a second, about; in larger jobs ranks report less often than once a second."""

FAILURE_KEY = "ds_compress/failure"
LONGEST_FAILURE = 2000
"""Longest text of a failure, in bytes; a line is longer."""

logger = logging.getLogger("ds_compress")
_numbers = itertools.count()  # of engines, alike on all ranks


class Watchdog:
    """One rank's part, for one engine; its thread starts at once."""

    def __init__(self, store: Store, rank: int, world_size: int, seconds: float):
        """
        Args:
            store: of the default process group; all ranks call this alike.
            seconds: of silence after which a rank that is needed has failed.
        """
        self._store = store
        self._rank = rank
        self._seconds = seconds
        self._tick = min(max(1.0, world_size / BEATS), seconds / 4)
        self._connections = Connections(store, f"ds_compress/watch/{next(_numbers)}", rank, world_size)
        self._process = os.getpid()
        self._is_connected = threading.Event()
        self._is_closed = False
        self._progress = 0
        self._is_inside = False
        self._error = ""  # with which this rank left its last call, if it may be caught
        self._overdue = 0.0  # seconds since then, or since the failure while inside
        self._failure = ""  # of the job
        self._last_tick = time.monotonic()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="ds_compress_watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, sends_messages: bool = True) -> Iterator[None]:
        """Watch a call that takes all ranks.

        Args:
            sends_messages: whether after an error of ours ranks cannot go on together.

        Raises:
            CompressionError: another rank has failed before.
        """
        if self._is_inside:
            yield
            return
        if self._failure:
            raise CompressionError(f"ds_compress: stopped: {self._failure}")
        self._overdue, self._error = 0.0, ""
        before = self._progress
        self._progress, self._is_inside = before + 1, True
        try:
            yield
            before += 2
        except BaseException as error:
            if sends_messages and isinstance(error, CompressionError):
                self._fail(f"rank {self._rank}: {error}")
            else:
                self._error = f"rank {self._rank}: {in_one_line(error)}"
            raise
        finally:
            self._progress, self._is_inside = before, False
            self._connections.wake()  # the process may end before the next tick

    def close(self) -> None:
        """Stop watching: this rank's engine has gone."""
        if os.getpid() != self._process or self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self._thread is not threading.current_thread():
            self._connections.wake()
            self._thread.join(GRACE)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        if self._error:
            self._fail(self._error)
        if self._is_connected.wait(GRACE):  # the thread may not have run since the last call
            self._report()

    def _fail(self, text: str) -> None:
        """Record that the job has failed; only the first reason counts."""
        if self._failure:
            return
        line = text.splitlines()[0].encode(errors="replace")[:LONGEST_FAILURE]
        self._failure, self._overdue = line.decode(errors="ignore"), 0.0
        self._report()
        if self._rank == 0:  # for whoever looks at the job from outside
            try:  # not here: another thread may wait in the store
                threading.Thread(target=self._store_failure, daemon=True).start()
            except RuntimeError:  # Python is ending
                self._store_failure()

    def _store_failure(self) -> None:
        with suppress(RuntimeError):
            self._store.set(FAILURE_KEY, self._failure)

    def _report(self) -> None:
        """Report to the others the progress of this rank, or that the job has failed."""
        self._connections.send(lambda: f"failed {self._failure}" if self._failure else f"at {self._progress}")

    def _run(self) -> None:
        try:
            self._connections.connect()
        except OSError as error:
            logger.warning(
                "ds_compress: rank %d cannot reach rank 0 at %s (%s): it learns of failures on other ranks "
                "only when its own transfers fail",
                self._rank,
                " or ".join(f"{host}, port {port}" for host, port in self._connections.addresses),
                error,
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
        if woken or now >= due:
            self._report()
        if now >= due:
            # while the process is stopped, or the machine asleep, nobody is late
            self._judge(min(now - self._last_tick, 2 * self._tick))
            self._last_tick = now

    def _hear(self, peer: Peer, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        peer.silence = 0.0
        if word == b"at" and rest.isdigit():
            peer.progress, peer.has_reported = int(rest), True
        elif word == b"failed" and rest:
            self._fail(rest.decode(errors="replace"))

    def _judge(self, seconds: float) -> None:
        """Look whether the job has failed, after so many more seconds."""
        if not self._failure:
            lost = self._find_lost(seconds)
            self._overdue += seconds if self._error else 0.0
            if lost or self._overdue > self._seconds:
                self._fail(lost or self._error)
        elif self._is_inside:
            self._overdue += seconds
            if self._overdue > GRACE:
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
            if peer.is_gone and peer.silence > GRACE:
                return f"rank {peer.rank} is gone"
            if peer.silence > self._seconds + self._tick:
                return (
                    f"rank {peer.rank} was not heard of for {self._seconds:g} s "
                    "(ds_compress.link.timeout_s): its process is stopped, or its host or the link to it is "
                    "down"
                )
        return ""

    def _end_process(self) -> None:
        # not through Python's streams: the main thread may hold them
        os.write(2, f"ds_compress: rank {self._rank} stops: {self._failure}\n".encode())
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        os._exit(1)
