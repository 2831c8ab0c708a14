"""The store at which replicas that are launched apart meet: torch's TCPStore, on a port that all reach."""

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, TypeVar

import psutil
from torch.distributed import TCPStore

from ds_compress.config import KEY, Config
from ds_compress.config.replicas import STORE
from ds_compress.errors import CompressionError, shown
from ds_compress.version import __version__

PLACE = f"{KEY}.replicas"
CONNECT_S = 30.0
"""Seconds in which a store answers."""

Found = TypeVar("Found")


class WatchedStore:
    """A store that says for how long it has not answered."""

    def __init__(self, store: Any):
        self._store = store
        self._asked: float | None = None

    def silence(self) -> float:
        """Return the seconds since the call that is in progress began; 0 without one."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._asked = time.monotonic()
            try:
                return method(*args)
            finally:
                self._asked = None

        return call


def connect(address: str, origin: str = f"{PLACE}.every: {STORE}", seconds: float = CONNECT_S) -> TCPStore:
    """Return a connection to the store at `address`, HOST:PORT.

    Args:
        origin: of the address, for errors.
        seconds: for an answer.

    Raises:
        CompressionError: this is no address.
        RuntimeError: no store answers there, or the host has no address.
    """
    host, port = parse_address(address, origin)
    try:  # torch would ask again and again
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise RuntimeError(f"the name {shown(host)} has no address here: {error}") from None
    # without a thread it would wait for ever for a port that accepts connections and says nothing
    join = functools.partial(TCPStore, is_master=False, wait_for_workers=False, timeout=timedelta(0, seconds))
    found = run_in_thread(lambda: join(host, port), "ds_compress_connect")
    try:
        return found.result(2 * seconds)
    except FutureTimeout:
        _end_connections(host, port)
        wait([found], seconds)  # a thread that is in torch when the interpreter ends may abort the process
        try:
            socket.create_connection((host, port), seconds).close()
        except OSError as error:
            raise RuntimeError(f"no `ds-compress replica-store` can be reached there: {error}") from None
        raise RuntimeError("what listens there does not answer; is it `ds-compress replica-store`?") from None


def run_in_thread(task: Callable[[], Found], name: str) -> Future[Found]:
    """Run a task in a thread of its own."""
    future: Future[Found] = Future()
    threading.Thread(target=settle, args=(future, task), name=name, daemon=True).start()
    return future


def settle(future: Future[Found], task: Callable[[], Found]) -> None:
    """Let a future have the result of a task, or its error."""
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


def reconnect() -> Any:
    """Return a new connection to the store. Most often nothing listens, which torch would try for long."""
    address = os.environ.get(STORE, "")
    socket.create_connection(parse_address(address), CONNECT_S).close()
    return connect(address)


def _end_connections(host: str, port: int) -> None:
    """Shut down this process's connections to `port` of `host`, so that what waits for them ends."""
    with contextlib.suppress(psutil.Error, OSError):
        hosts = {str(found[4][0]) for found in socket.getaddrinfo(host, port)}
        for each in psutil.Process().net_connections("tcp"):
            if each.raddr and each.raddr.port == port and each.raddr.ip.removeprefix("::ffff:") in hosts:
                with socket.socket(fileno=os.dup(each.fd)) as own:
                    own.shutdown(socket.SHUT_RDWR)


def parse_address(text: str, origin: str = f"{PLACE}.every: {STORE}") -> tuple[str, int]:
    """Return host and port.

    Raises:
        CompressionError: begins with `origin`.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        came = f"is {shown(text)}" if text else "is not set"
        raise CompressionError(
            f"{origin} {came}; set it to HOST:PORT, where `ds-compress replica-store --port PORT` runs"
        )
    return host.strip("[]"), int(port)


def shared_settings(config: Config) -> dict[str, Any]:
    """Return what all replicas must have, by JSON path, as far as `config` says it."""
    replicas, outer = config.block.replicas, config.outer
    assert replicas is not None and outer is not None
    own = {f"{PLACE}.outer.{name}": getattr(outer, name) for name in ("lr", "momentum", "delay")}
    own[f"{PLACE}.every"] = replicas.every
    return {"ds_compress": __version__, **own, f"{KEY}.seed": config.block.seed}


def check_shared(own: dict[str, Any], theirs: dict[str, Any]) -> None:
    """
    Raises:
        CompressionError: settings differ that all replicas must share; names the first.
    """
    for key in {**own, **theirs}:
        if own.get(key) != theirs.get(key):
            raise CompressionError(
                f"{key}: the other replicas have {shown(theirs.get(key))}, this one has "
                f"{shown(own.get(key))}; use the same in all launches"
            )
