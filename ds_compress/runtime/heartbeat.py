"""Heartbeats beside the data: a socket between rank 0 and every other rank, lines of ASCII.

    hello TOKEN RANK     first, from a rank to rank 0
    at N                 progress of the sender (see watchdog.py), at every tick
    at N waits           it is inside a transfer, and was at the tick before
    at N left TEXT       it has left a call with an error that its program may catch
    failed TEXT          the job has failed, and why; rank 0 forwards it

Rank 0 listens at the addresses at which the others reach it for training, and on all interfaces only if none
of these is its own. Anybody may connect there. A connection that has not sent hello with the token, which
ranks read from the store of torch.distributed, is a stranger. Strangers get no data, and what they send is
not decoded. They are dropped after a few seconds, after a long line, and when too many others connect.

Heartbeats do not use that store: its calls do not return if nobody answers, and when it closes, as at the end
of every run, torch writes pages to the log.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import Store

from ds_compress.transport.connections import accepting, files_left, make_room

LONGEST_LINE = 4096
"""Bytes of a line between ranks."""
LONGEST_HELLO = 128
"""Bytes of the line with which a connection begins."""
HELLO_SECONDS = 10.0
"""Time for a connection to send hello."""
MOST_STRANGERS = 256
"""Connections that have not sent hello; beyond that the oldest is dropped."""
BACKLOG = 4096
"""Connections that may wait to be accepted; the system may allow fewer."""
CONNECT_SECONDS = 5.0
MOST_ATTEMPTS = 20
"""Connections that a rank makes until rank 0 answers one: in a flood of others rank 0 may drop it."""
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""No SIGPIPE, even if a program has enabled it."""

Address = tuple[str, int]
"""Host and port."""

logger = logging.getLogger("ds_compress")


class Peer:
    """The other end of a connection, and what is known of it."""

    def __init__(self, connection: socket.socket, rank: int | None = None):
        """
        Args:
            rank: of the other end, None until it has sent hello.
        """
        connection.setblocking(False)
        # a process that ends with lines unread drops those that TCP holds back until others arrived
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank = rank
        self.progress = 0
        self.has_reported = False
        """Whether it has sent its progress."""
        self.is_waiting = False
        """Whether it waits for a transfer."""
        self.left = ""
        """The error with which it left a call that it has not completed since."""
        self.is_gone = False
        self.silence = 0.0
        """Seconds for which it has been missed."""
        self.since = time.monotonic()
        self._incomplete = b""

    def send(self, line: str) -> None:
        """Send a line; drop it if the connection takes no more: `receive` finds out why."""
        with suppress(OSError):
            self.connection.send(line.encode() + b"\n", NO_SIGNAL)

    def receive(self) -> list[bytes]:
        """Return the complete lines that have come; the peer is gone when the connection is closed or a line
        is too long."""
        try:
            data = self.connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        longest = LONGEST_HELLO if self.rank is None else LONGEST_LINE
        self.is_gone = not data or len(self._incomplete) > longest
        return lines


class Connections:
    """The connections of one rank; all but `send` and `wake` is for one thread."""

    def __init__(self, store: Store, key: str, rank: int, world_size: int):
        """
        Args:
            store: in which rank 0 publishes its address; every rank passes the same one.
            key: below which it does.
        """
        self.rank = rank
        self.peers: list[Peer] = []
        """Those that have sent hello."""
        self._strangers: dict[Peer, None] = {}
        self._world_size = world_size
        self._attempts = 0
        self._is_closed = False
        self._lock = threading.Lock()  # around `peers` and sending
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listeners: list[socket.socket] = []
        token: str
        if rank == 0:
            # the order in which each of the others would try these addresses of rank 0
            known = [json.loads(store.get(f"{key}/{other}")) for other in range(1, world_size)]
            self._listeners, self.addresses = _listen(known)
            accepting.add(self)
            make_room()
            if not files_left():
                logger.warning(
                    f"ds_compress: rank 0 may open too few files to hear of failures of all {world_size} "
                    "ranks (`ulimit -Hn`); allow more"
                )
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, listener)
            token = secrets.token_hex(16)
            store.set(key, json.dumps([token, self.addresses]))
        else:
            own = _addresses_of_rank_0(store)
            store.set(f"{key}/{rank}", json.dumps(own))
            token, addresses = json.loads(store.get(key))
            self.addresses = sorted(map(tuple, addresses), key=lambda address: address[0] not in own)
        self._token = token.encode()
        _open.add(self)

    def awaited(self) -> int:
        """Return how many ranks have yet to connect to rank 0."""
        return 0 if self._is_closed else self._world_size - 1 - len(self.peers)

    def connect(self) -> None:
        """Connect to rank 0.

        Raises:
            OSError: of the last address tried.
        """
        failure: OSError | None = None
        for address in self.addresses if self.rank else ():
            self._attempts += 1
            try:
                peer = Peer(socket.create_connection(address, CONNECT_SECONDS), rank=0)
            except OSError as error:
                failure = error
                continue
            peer.send(f"hello {self._token.decode()} {self.rank}")
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            with self._lock:
                self.peers.append(peer)
            return
        if failure:
            raise failure

    def send(self, compose: Callable[[], str]) -> None:
        """Send the line that `compose` returns to all peers, from any thread; one composed later arrives
        later."""
        with self._lock:
            line = compose()
            for peer in self.peers:
                peer.send(line)

    def wake(self) -> None:
        """Let the thread return from `wait`."""
        with suppress(OSError):
            self._waker.send(b".", NO_SIGNAL)

    def wait(self, seconds: float, handle: Callable[[Peer, bytes], None]) -> bool:
        """Give `handle` the lines that come first within so many seconds; returns whether `wake` was
        called."""
        woken = False
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._woken:
                woken = bool(self._woken.recv(LONGEST_LINE))
            elif isinstance(key.data, Peer):
                if key.data.connection.fileno() >= 0:  # not dropped since
                    self._receive(key.data, handle)
            else:
                self._accept(key.data, handle)
        overdue = time.monotonic() - HELLO_SECONDS
        for peer in [peer for peer in self._strangers if peer.since < overdue]:
            self._drop(peer)
        return woken

    def close(self) -> None:
        """Close all connections; from then on other ranks see that this one has gone."""
        self._is_closed = True
        self._selector.close()
        ends = [self._waker, self._woken, *self._listeners]
        for end in ends + [peer.connection for peer in [*self.peers, *self._strangers]]:
            end.close()

    def _accept(self, listener: socket.socket, handle: Callable[[Peer, bytes], None]) -> None:
        """Take the connections that wait, not more at once than may be strangers."""
        for _ in range(MOST_STRANGERS):
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            try:
                peer = Peer(listener.accept()[0])
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or this process has too many files open
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                return
            self._strangers[peer] = None
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            self._receive(peer, handle)  # a rank's hello has often come by now

    def _receive(self, peer: Peer, handle: Callable[[Peer, bytes], None]) -> None:
        try:
            for line in peer.receive():
                if peer.rank is None:
                    self._admit(peer, line)
                elif not peer.is_gone:
                    handle(peer, line)
                if peer.is_gone:
                    break
        except Exception:  # whatever a peer sends, others are still listened to
            logger.exception(f"ds_compress: cannot read a heartbeat of rank {peer.rank}")
            peer.is_gone = True
        if peer.is_gone:
            self._drop(peer)

    def _admit(self, peer: Peer, line: bytes) -> None:
        """Make the stranger a peer if `line` is a rank's hello."""
        words = line.split()
        if len(words) == 3 and words[0] == b"hello" and words[2].isdigit() and len(line) <= LONGEST_HELLO:
            rank = int(words[2])
            if secrets.compare_digest(words[1], self._token) and 0 < rank < self._world_size:
                peer.rank = rank
                del self._strangers[peer]
                with self._lock:
                    self.peers = [other for other in self.peers if other.rank != rank] + [peer]
                return
        peer.is_gone = True

    def _drop(self, peer: Peer) -> None:
        """Close a connection. A peer stays among `peers`, as one that is gone; one that rank 0 never answered
        connects again."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._strangers.pop(peer, None)
        if peer.rank == 0 and not peer.has_reported and self._attempts < MOST_ATTEMPTS:
            with self._lock:
                self.peers.remove(peer)
            with suppress(OSError):
                self.connect()


_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close a fork's copies of connections: while one is open, other ranks do not see that this one ends."""
    for each in _open:
        each.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _listen(known: list[list[str]]) -> tuple[list[socket.socket], list[Address]]:
    """Listen at the first address of each list that is this machine's, or on all interfaces where a list has
    none.

    Returns:
        The listening sockets, and where they can be reached.
    """
    servers: dict[str, socket.socket] = {}
    for addresses in known:
        if not any(_is_listening(address, servers) for address in addresses):
            for server in servers.values():
                server.close()
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            everywhere = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=BACKLOG)
            hosts = dict.fromkeys([*(host for each in known for host in each), socket.gethostname()])
            return [everywhere], [(host, everywhere.getsockname()[1]) for host in hosts]
    return [*servers.values()], [(host, server.getsockname()[1]) for host, server in servers.items()]


def _is_listening(address: str, servers: dict[str, socket.socket]) -> bool:
    """Return whether one of `servers`, or else a new one, listens at `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if address not in servers:
        with suppress(OSError):
            servers[address] = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    return address in servers


def _addresses_of_rank_0(store: Store) -> list[str]:
    """Return what this rank finds for the names of rank 0: its own store usually, and the launcher's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    found: dict[str, None] = {}
    for host in filter(None, (getattr(store, "host", None), os.environ.get("MASTER_ADDR"))):
        with suppress(OSError):
            resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.update(dict.fromkeys(str(address[0]) for *_, address in resolved))
    return list(found)
