"""What others on a network send to any port that listens: scanners, browsers, floods."""

import contextlib
import random
import resource
import socket
import time
from collections.abc import Iterable, Iterator

import psutil

TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0\r\nAccept: */*\r\n\r\n"

MESSAGES = {
    "nothing": b"",
    "random": random.Random(0).randbytes(5000),
    "random lines": b"\n".join(random.Random(n).randbytes(n) for n in range(1, 200)),
    "TLS": TLS_HELLO,
    "HTTP": HTTP,
    "a hello that is not ASCII": b"hello \xff 1\n",
    "a hello with digits that are not ASCII": "hello ٣ ٣\nfailed no\n".encode(),
    "a hello of a wrong token": b"hello 00000000000000000000000000000000 1\nfailed no\n",
    "half a hello": b"hello 0000",
    "words": b"failed no\nat 5\n\n \nhello\nhello 1\nhello 1 2 3 4\n",
    "100 kB without a line": b"x" * 100_000,
    "100 kB lines": (b"hello " + b"y" * 100_000 + b" 1\n") * 3,
    "zeros": bytes(10_000),
}


def disturb(ports: Iterable[int], address: str = "127.0.0.1") -> None:
    """Send each message to each port, and wait a moment for an answer."""
    for port in ports:
        for message in MESSAGES.values():
            with contextlib.suppress(OSError), socket.create_connection((address, port), 60) as stranger:
                stranger.sendall(message)
                stranger.settimeout(0.05)
                stranger.recv(1)


@contextlib.contextmanager
def flood(port: int, connections: int = 3000, address: str = "127.0.0.1") -> Iterator[None]:
    """As many connections, open until the end of the context or until the other end closes them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * connections + 1000  # both ends may be in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(connections):
            stack.enter_context(socket.create_connection((address, port), 60)).send(b"h")
        yield


def listening_ports(*processes: int) -> list[int]:
    """Ports on which processes listen for TCP connections."""
    found = [each for pid in processes for each in psutil.Process(pid).net_connections("tcp")]
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


def eventually(condition, seconds: float = 300.0) -> None:
    """Return when `condition()` holds; what hangs fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.02)
