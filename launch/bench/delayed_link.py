"""Connect two network namespaces by a link that delays every packet, for two_hosts.sh on kernels without
netem.

    python launch/bench/delayed_link.py HOST_A HOST_B DEVICE RTT_MS

Makes a tun device of that name in each namespace and carries IP packets between them, each RTT_MS / 2 late,
in their order, until it is ended. How fast they go in is the business of tc on the devices. Needs root.
"""

import contextlib
import ctypes
import fcntl
import os
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


def carry(devices: tuple[int, int], seconds: float) -> None:
    """Forward packets between two devices, each `seconds` late; never returns."""
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
                in_flight[other[device]].append((now + seconds, packet))
        now = time.monotonic()
        for device, packets in in_flight.items():
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):  # the device is down: nobody is there, as on any wire
                    os.write(device, packets.popleft()[1])


def main() -> None:
    host_a, host_b, name, rtt = sys.argv[1:]
    carry((device_in(host_a, name), device_in(host_b, name)), float(rtt) / 2e3)


if __name__ == "__main__":
    main()
