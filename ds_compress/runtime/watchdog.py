"""Every rank of the job stops, with one message, when one of them fails, falls silent or is cut off.

A thread of each rank tells rank 0, and that of rank 0 tells them, how far it has come:

    2n - 1   inside its n-th train_batch or eval_batch        2n   through with it

How long a rank computes is its own affair, and so is what it does between steps: its thread goes on telling.
But a step takes all ranks. One that others inside it still need has failed when it is silent for
`link.timeout_s`, or when its connection is closed. One that leaves a step with an error of ours has failed:
no packet is where it is expected any more. With any other error it has when its process ends, or begins no
other step for `link.timeout_s`: a program may catch it and go on.

Who finds that the job has failed tells the others. Ranks inside the step have GRACE seconds to raise an error
of their own; one that stands in a collective then cannot, and its process ends. Ranks between steps raise
when they begin the next.
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
from ds_compress.runtime.watch import Peer, Watch

GRACE = 4.0
"""Seconds for an error that is on its way."""

BEATS = 1000
"""Lines that rank 0 takes in a second, about; larger jobs tell less often than once a second."""

FAILURE_KEY = "ds_compress/failure"
LONGEST_FAILURE = 2000  # characters

logger = logging.getLogger("ds_compress")
_numbers = itertools.count()  # of engines, alike on all ranks


class Watchdog:
    """One rank's part, for one engine; its thread starts with the first step."""

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
        self._watch = Watch(store, f"ds_compress/watch/{next(_numbers)}", rank, world_size)
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._met = threading.Event()
        self._closed = False
        self._progress = 0
        self._inside = False
        self._left = ""  # the error with which this rank left its last step, if not ours
        self._overdue = 0.0  # seconds since then, or since the failure while inside
        self._failure = ""  # of the job

    @contextmanager
    def step(self) -> Iterator[None]:
        """Round everything that takes all ranks.

        Raises:
            CompressionError: another rank has failed before.
        """
        if self._inside:
            yield
            return
        if self._failure:
            raise CompressionError(f"ds_compress: stopped: {self._failure}")
        self._start()
        self._overdue, self._left = 0.0, ""
        before = self._progress
        self._progress, self._inside = before + 1, True
        try:
            yield
            before += 2
        except CompressionError as error:
            self._fail(f"rank {self._rank}: {error}")
            raise
        except BaseException as error:
            self._left = f"rank {self._rank}: {in_one_line(error)}"
            raise
        finally:
            self._progress, self._inside = before, False
            self._watch.wake()  # the process may end before the next tick

    def close(self) -> None:
        """This rank's engine has gone."""
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._thread is None:
            self._watch.close()
        elif self._thread is not threading.current_thread():
            self._watch.wake()
            self._thread.join(GRACE)

    def _start(self) -> None:
        if self._thread is None:
            atexit.register(self._at_exit)
            self._thread = threading.Thread(target=self._run, name="ds_compress_watchdog", daemon=True)
            self._thread.start()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        if self._left:
            self._fail(self._left)
        if self._met.wait(GRACE):  # the thread may not have come to it since the last step
            self._tell()

    def _fail(self, text: str) -> None:
        """The job has failed: the first to say why is heard."""
        if self._failure:
            return
        self._failure, self._overdue = text.splitlines()[0][:LONGEST_FAILURE], 0.0
        self._tell()
        if self._rank == 0:  # for whoever looks at the job from outside
            try:  # not here: another thread may wait in the store
                threading.Thread(target=self._put, daemon=True).start()
            except RuntimeError:  # Python is ending
                self._put()

    def _put(self) -> None:
        with suppress(RuntimeError):
            self._store.set(FAILURE_KEY, self._failure)

    def _tell(self) -> None:
        self._watch.tell(lambda: f"failed {self._failure}" if self._failure else f"at {self._progress}")

    def _run(self) -> None:
        try:
            self._watch.meet()
        except OSError as error:
            logger.warning(
                "ds_compress: rank %d does not reach rank 0 at %s, port %d (%s): of failures elsewhere it "
                "hears only when its own transfers fail",
                self._rank,
                " or ".join(self._watch.hosts),
                self._watch.port,
                error,
            )
            self._watch.close()
            return
        finally:
            self._met.set()
        self._tell()
        before = time.monotonic()
        while not self._closed:
            woken = self._watch.wait(before + self._tick - time.monotonic(), self._take)
            now = time.monotonic()
            if woken or now >= before + self._tick:
                self._tell()
            if now >= before + self._tick:
                # while the process is stopped, or the machine asleep, nobody is late
                self._judge(min(now - before, 2 * self._tick))
                before = now
        self._tell()
        self._watch.close()

    def _take(self, peer: Peer, line: str) -> None:
        word, _, rest = line.partition(" ")
        peer.quiet = 0.0
        if word == "at" and rest.isdecimal():
            peer.progress, peer.heard = int(rest), True
        elif word == "failed" and rest:
            self._fail(rest)

    def _judge(self, seconds: float) -> None:
        """After so many more seconds."""
        if not self._failure:
            missing = self._missing(seconds)
            self._overdue += seconds if self._left else 0.0
            if missing or self._overdue > self._seconds:
                self._fail(missing or self._left)
        elif self._inside:
            self._overdue += seconds
            if self._overdue > GRACE:
                self._end_process()

    def _missing(self, seconds: float) -> str:
        """Which rank others have missed for too long, and since when."""
        inside = [peer.progress for peer in self._watch.peers if peer.progress % 2 and not peer.gone]
        inside += [self._progress] if self._inside else []
        front = max(inside, default=-1)
        for peer in self._watch.peers:
            alone = peer.progress == front and inside.count(front) == 1
            if not peer.heard or peer.progress > front or alone:
                peer.quiet = 0.0
                continue
            peer.quiet += seconds
            if peer.gone and peer.quiet > GRACE:
                return f"rank {peer.rank} is gone"
            if peer.quiet > self._seconds + self._tick:
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
