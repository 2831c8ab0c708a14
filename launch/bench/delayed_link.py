"""Connect two network namespaces by a link that delays packets and loses some, for two_hosts.sh on kernels
without netem.

    python launch/bench/delayed_link.py HOST_A HOST_B DEVICE RTT_MS [LOSS [JITTER_MS]]

Makes a tun device of that name in each namespace and carries IP packets between them, each RTT_MS / 2 and a
random time of 0 to JITTER_MS late, in their order, until it is ended. Of every 100 packets LOSS are lost, at
random. How fast they go in is the business of tc on the devices. Needs root.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

TUNSETIFF = 0x400454CA  # from linux/if_tun.h
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000  # from linux/sched.h
LARGEST = 65536  # bytes of a packet
AT_ONCE = 64  # packets taken from one side before the other is looked at


def device_in(namespace: str, name: str) -> int:
    """Open a new tun device in `namespace` and return its file descriptor; this process stays in the
    namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as host:
        if libc.setns(host.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(devices: tuple[int, int], seconds: float, loss: float = 0.0, jitter: float = 0.0) -> None:
    """Forward packets between two devices; never returns.

    Args:
        seconds: that each packet is late.
        loss: the share of packets that are dropped.
        jitter: the most seconds that a packet is later than that; packets stay in their order.
    """
    chance = random.Random(1)
    other = dict(zip(devices, reversed(devices)))
    in_flight: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}  # by goal
    while True:
        due = [packets[0][0] for packets in in_flight.values() if packets]
        left = max(0.0, min(due) - time.monotonic()) if due else None
        for device in select.select(devices, [], [], left)[0]:
            now = time.monotonic()
            for _ in range(AT_ONCE):
                try:
                    packet = os.read(device, LARGEST)
                except BlockingIOError:
                    break
                if chance.random() >= loss:
                    queue, due_at = in_flight[other[device]], now + seconds + jitter * chance.random()
                    queue.append((max(due_at, queue[-1][0]) if queue else due_at, packet))
        now = time.monotonic()
        for device, packets in in_flight.items():
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # the device is down: nobody is there, as on any wire
                    os.write(device, packets.popleft()[1])


def main() -> None:
    host_a, host_b, name, rtt, *more = sys.argv[1:]
    loss, jitter = [*map(float, more), 0.0, 0.0][:2]
    devices = device_in(host_a, name), device_in(host_b, name)
    carry(devices, float(rtt) / 2e3, loss / 100, jitter / 1e3)


if __name__ == "__main__":
    main()
