"""Move chunks to and from the store: one after the other, or side by side over further connections.

A TCP connection waits for round trips, and for packets that were lost; others need not wait with it. The
connection that says what is there, and gives signs of life, stays free meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial

from ds_compress.errors import CompressionError
from ds_compress.sites.store import run_in_thread
from ds_compress.sites.store_keys import Keys

LOOK_S = 0.05
"""Seconds between two looks at what is under way."""

SILENCE_S = 300.0
"""Seconds without a chunk after which a connection is given up."""

END_S = 5.0
"""Seconds in which a thread ends that has nothing more to move."""

Move = Callable[[Keys], None]
"""Moves a chunk over a connection."""


class ChunkMover:
    """Moves the chunks of one board."""

    def __init__(self, own: Keys, further: Sequence[Keys], tend: Callable[[], object]):
        """
        Args:
            own: moves chunks if there are no further ones, or while these move others.
            tend: called between two chunks, and while they are on their way.
        """
        self._own, self._further, self._tend = own, further, tend
        self._is_moving = False
        self._failure: Exception | None = None  # of a connection, which moves nothing any more
        self.moved = 0
        """Chunks so far; threads may miss one, as only a change counts."""

    @property
    def at_once(self) -> int:
        """Return how many chunks cross side by side."""
        return max(1, len(self._further))

    def move(self, moves: Sequence[Move]) -> None:
        """Make all moves, in any order. When it returns, the store has what crossed over further connections.

        Raises:
            CompressionError: that a move raises, or a connection was silent for too long.
            RuntimeError: a connection was lost, now or before.
        """
        if self._failure is not None:
            raise RuntimeError(f"a connection to the replica store was lost: {self._failure}")
        left = deque(moves)
        if not self._further or self._is_moving:
            while left:
                left.popleft()(self._own)
                self.moved += 1
                self._tend()
            return
        self._is_moving = True
        others = [
            run_in_thread(partial(self._move_some, left, keys), "ds_compress_moves")
            for keys in self._further[: len(left)]
        ]
        try:
            moved, since = self.moved, time.monotonic()
            while wait(others, LOOK_S).not_done and time.monotonic() - since < SILENCE_S:
                self._tend()
                if moved != self.moved:
                    moved, since = self.moved, time.monotonic()
        finally:
            left.clear()
            if wait(others, END_S).not_done:  # in torch when the interpreter ends, it would abort the process
                self._failure = CompressionError("one of several connections to the replica store is silent")
            self._is_moving = False
        for other in others:
            if not other.done():
                assert self._failure is not None
                raise self._failure
            other.result()

    def _move_some(self, left: "deque[Move]", keys: Keys) -> None:
        """Make moves over one connection until no other one has left any."""
        try:
            while left:
                try:
                    move = left.popleft()
                except IndexError:  # another one took it
                    break
                move(keys)
                self.moved += 1
            keys.await_answer()  # the store knows no order between connections
        except Exception as error:
            left.clear()
            if not isinstance(error, CompressionError):
                self._failure = error
            raise
