"""How ranks hear of each other beside the data: a socket between rank 0 and every other rank, lines of text.

    hello TOKEN RANK     first, from a rank to rank 0
    at N                 how far the sender has come (see watchdog.py); at every tick: silence tells too
    failed TEXT          the job has failed, and why; rank 0 passes it on

Not through the store of torch.distributed: where nobody answers, its calls do not return, and when it goes
away, which is no failure at the end of a run, torch writes pages to the log.
"""

import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import Store

LONGEST = 4096  # bytes of a line
CONNECT_SECONDS = 5.0
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have given SIGPIPE back its meaning


class Peer:
    """The other end of a connection, and what is known of it."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection = connection
        self.rank: int | None = None  # until it has said hello
        self.progress = 0
        self.heard = False  # whether it has said how far it is
        self.gone = False
        self.quiet = 0.0  # seconds for which it has been missed
        self._rest = b""

    def say(self, line: str) -> None:
        """Send a line; lost when the other end takes nothing any more, which reading will tell."""
        with suppress(OSError):
            self.connection.send(line.encode() + b"\n", NO_SIGNAL)

    def listen(self) -> list[str]:
        """The complete lines that have come."""
        try:
            data = self.connection.recv(LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.gone = not data or len(self._rest) > LONGEST
        return [line.decode(errors="replace") for line in lines]


class Watch:
    """The connections of one rank; all but `tell` and `wake` is for one thread."""

    def __init__(self, store: Store, key: str, rank: int, world_size: int):
        """Rank 0 writes below `key` of `store` where it can be reached, the others read it."""
        self.rank = rank
        self.peers: list[Peer] = []
        self._world_size = world_size
        self._lock = threading.Lock()  # around the list and sending
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        if rank == 0:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(
                ("", 0), family=family, dualstack_ipv6=both, backlog=world_size
            )
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            port = self._listener.getsockname()[1]
            store.set(key, json.dumps([secrets.token_hex(16), port, socket.gethostname()]))
        self._token, self.port, hostname = json.loads(store.get(key))
        # rank 0 usually keeps the store, and the store's address is known to be in reach
        known = [_host_of(store), os.environ.get("MASTER_ADDR"), hostname]
        self.hosts = list(dict.fromkeys(host for host in known if host))

    def meet(self) -> None:
        """Connect to rank 0.

        Raises:
            OSError: of the last address tried.
        """
        failure: OSError | None = None
        for host in self.hosts if self.rank else ():
            try:
                peer = Peer(socket.create_connection((host, self.port), CONNECT_SECONDS))
            except OSError as error:
                failure = error
                continue
            peer.rank = 0
            peer.say(f"hello {self._token} {self.rank}")
            self._add(peer)
            return
        if failure:
            raise failure

    def tell(self, compose: Callable[[], str]) -> None:
        """Send the line that `compose` gives to all, from any thread; one composed later arrives later."""
        with self._lock:
            line = compose()
            for peer in self.peers:
                peer.say(line)

    def wake(self) -> None:
        """Let the thread return from `wait`."""
        with suppress(OSError):
            self._waker.send(b".", NO_SIGNAL)

    def wait(self, seconds: float, take: Callable[[Peer, str], None]) -> bool:
        """Let `take` have the lines that come first within so many seconds; whether `wake` was called."""
        woken = False
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._woken:
                woken = bool(self._woken.recv(LONGEST))
            elif isinstance(key.data, Peer):
                self._listen(key.data, take)
            else:
                with suppress(OSError):
                    self._add(Peer(self._listener.accept()[0]))
        return woken

    def close(self) -> None:
        self._selector.close()
        own = [self._waker, self._woken] + ([self._listener] if self.rank == 0 else [])
        for end in own + [peer.connection for peer in self.peers]:
            end.close()

    def _add(self, peer: Peer) -> None:
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        with self._lock:
            self.peers.append(peer)

    def _listen(self, peer: Peer, take: Callable[[Peer, str], None]) -> None:
        for line in peer.listen():
            if peer.rank is None:
                peer.rank = self._welcome(line.split())
                peer.gone = peer.gone or peer.rank is None
            elif not peer.gone:
                take(peer, line)
        if peer.gone:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.rank is None:
                with self._lock:
                    self.peers.remove(peer)

    def _welcome(self, words: list[str]) -> int | None:
        """The rank that says hello with `words`, None for a stranger."""
        if len(words) == 3 and secrets.compare_digest(words[1], self._token) and words[2].isdecimal():
            rank = int(words[2])
            return rank if 0 < rank < self._world_size else None
        return None


def _host_of(store: Store) -> str | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
