"""How many connections are made at once over one client of the job's store.

While a client waits for a key, no other thread can use it. Further clients cost the start of the job: the
server looks up the host name of each, and answers nobody until DNS does, or for seconds if DNS does not. So
one thread asks the store, again and again, which of all awaited keys are there.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist

PAUSES = 0.001, 0.1
"""Shortest and longest pause, in seconds, before the store is asked again."""


class Rendezvous:
    """The keys of some connections, each made by a thread of its own; `serve` is for one other thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leaving: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}
        self._awaited: dict[Sequence[int], set[str]] = defaultdict(set)
        self._has_ended = False

    def set(self, key: str, value: bytes) -> None:
        """Give other ranks the bytes `value`; `serve` sends them."""
        with self._changed:
            self._known[key] = self._leaving[key] = value
            self._changed.notify_all()

    def get(self, ranks: Sequence[int], keys: Sequence[str], seconds: float) -> list[bytes]:
        """Return what `ranks` have set, once all of it is there.

        Raises:
            DistStoreError: it did not come within so many seconds, or `serve` has ended.
        """
        with self._changed:
            self._awaited[ranks].update(key for key in keys if key not in self._known)
            self._changed.wait_for(
                lambda: self._has_ended or all(key in self._known for key in keys), seconds
            )
            if missing := [key for key in keys if key not in self._known]:
                raise dist.DistStoreError(f"no {', '.join(missing)} after {seconds:g} s")
            return [self._known[key] for key in keys]

    def wake(self) -> None:
        """Let `serve` look whether it may end."""
        with self._changed:
            self._changed.notify_all()

    def serve(self, store: Any, may_end: Callable[[], bool]) -> None:
        """Exchange keys through `store` until it `may_end`.

        Raises:
            RuntimeError: the store failed.
        """
        pause, longest = PAUSES
        try:
            while not may_end():
                with self._changed:
                    self._changed.wait_for(lambda: self._leaving or may_end(), pause)
                    leaving, self._leaving = self._leaving, {}
                    awaited = [[*keys] for keys in self._awaited.values() if keys]
                if leaving:
                    store.multi_set([*leaving], [*leaving.values()])
                come: dict[str, bytes] = {}
                for keys in awaited:
                    if store.check(keys):
                        come.update(zip(keys, store.multi_get(keys)))
                with self._changed:
                    self._known.update(come)
                    for missing in self._awaited.values():
                        missing.difference_update(come)
                    self._changed.notify_all()
                pause = PAUSES[0] if leaving or come else min(2 * pause, longest)
        finally:
            self._has_ended = True
            self.wake()


class Mailbox(dist.Store):
    """The store of one connection, as gloo knows it."""

    def __init__(self, rendezvous: Rendezvous, ranks: Sequence[int], name: str, seconds: float):
        """Hold the keys below `name`, which `ranks` have in common and for which gloo waits so long."""
        super().__init__()
        self._rendezvous, self._ranks, self._name, self._seconds = rendezvous, ranks, name, seconds

    def set(self, key: str, value: Any) -> None:
        self._rendezvous.set(f"{self._name}/{key}", bytes(value))

    def get(self, key: str) -> bytes:
        return self._get([key])[0]

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._get(keys)

    def _get(self, keys: list[str]) -> list[bytes]:
        return self._rendezvous.get(self._ranks, [f"{self._name}/{key}" for key in keys], self._seconds)
