"""Connections to the store, and the thread that uses them while training goes on."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from torch import distributed as dist

from ds_compress.sites.rounds import BEAT_S, Rounds
from ds_compress.sites.store import Found, WatchedStore, settle

EXIT_S = 5.0
"""Seconds in which a thread answers that is in no call of the store."""


class Worker:
    """Connections to the store, with the thread that uses them after a replica has joined."""

    def __init__(self, launch_store: Any, options: Any, *stores: Any):
        """
        Args:
            launch_store: of this launch alone; stores: connections to that of all replicas.
        """
        self._stores = [WatchedStore(store) for store in stores]
        store, *further = self._stores
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.rounds = Rounds(store, launch_store, rank, world_size, options, further)
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self.rounds, self._tasks), daemon=True)
        thread.name = "ds_compress_replicas"
        thread.start()
        weakref.finalize(self, _end, self.rounds, self._tasks, thread)

    def silence(self) -> float:
        """Return for how many seconds the store has not answered; 0 if nothing was asked. Chunks that
        cross side by side share the link: the wait for one of N counts as an N-th."""
        own, *further = (store.silence() for store in self._stores)
        return max([own, *(each / len(further) for each in further)])

    def run(self, task: Callable[[], Found]) -> "Future[Found]":
        """Run a task in the thread."""
        future: Future[Found] = Future()
        self._tasks.put((future, task))
        return future

    def result(self, task: Callable[[], Found], limit: float) -> Found:
        """Run a task in the thread; return its result.

        Args:
            limit: seconds for which the store may be silent; a call of it has none of its own.

        Raises:
            RuntimeError: the store does not answer.
        """
        future = self.run(task)
        while not wait([future], 0.1).done:
            if self.silence() > limit:
                raise RuntimeError("the replica store does not answer")
        return future.result()

    def close(self) -> None:
        self._tasks.put(None)


def _end(rounds: Rounds, tasks: "queue.SimpleQueue[Any]", thread: threading.Thread) -> None:
    """Let the thread end before the interpreter does: inside the store it would abort the process."""
    rounds.ended.set()
    tasks.put(None)
    thread.join(EXIT_S)


def _work(rounds: Rounds, tasks: "queue.SimpleQueue[Any]") -> None:
    pause = BEAT_S
    while True:
        try:
            found = tasks.get(timeout=pause)
        except queue.Empty:
            try:
                pause = rounds.idle() if rounds.number >= 0 else BEAT_S
            except Exception:  # the next exchange raises it
                pause = BEAT_S
            continue
        if found is None:
            return
        settle(*found)
        pause = 0.0
