"""Make hosts in network namespaces, log in to them, and send what strangers send to ports."""

import contextlib
import os
import random
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

WIRE = "wire"
ADDRESSES = ("10.77.1.1", "10.77.1.2")


def reason_for_none() -> str:
    """Why there can be no two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is missing (iproute2)"
    name = f"ds-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Hosts:
    def __init__(self, names: tuple[str, str]):
        self._names = names

    def on(self, host: int) -> list[str]:
        """What to put before a command to run it on host 0 or 1."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self) -> None:
        """From now on the link loses every packet, as a switch that has failed does: nobody is told."""
        shaping = f"tc qdisc replace dev {WIRE} root tbf rate 8bit burst 1 latency 1ms".split()
        for host in range(2):
            subprocess.run([*self.on(host), *shaping], check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    names = (f"ds-a-{os.getpid()}", f"ds-b-{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("-n", names[0], "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/30", "dev", WIRE)
            for device in ("lo", WIRE):
                ip("-n", name, "link", "set", device, "up")
        yield Hosts(names)
    finally:
        for name in made:
            ip("netns", "del", name)


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
