"""What one machine says of itself: versions, compiled kernels, interfaces."""

import ipaddress
import os
import platform
import socket
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_compress.errors import CompressionError
from ds_compress.kernels import library
from ds_compress.version import __version__

LIBRARIES = ("torch", "deepspeed", "transformers")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
IP = (socket.AF_INET, socket.AF_INET6)
LOOPBACK = "lo"
BUFFERS = Path("/proc/sys/net/ipv4")

Facts = dict[str, Any]


def facts(meeting_point: str | None = None) -> Facts:
    """Of this machine, as JSON; `meeting_point` is the address of rank 0, where there is one."""
    interface, why = gloo_interface()
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "switched_on": switched_on(),
        "device": device(),
        "kernels": kernels(),
        "interfaces": interfaces(),
        "gloo_interface": interface,
        "gloo_because": why,
        "way": way_to(meeting_point) if meeting_point else None,
        "window_bytes": window(),
    }


def versions() -> dict[str, str | None]:
    """None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "ds_compress": __version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__  # "+cpu" and the like are not in the metadata of every build
    return found


def switched_on() -> bool:
    """Whether torch loads ds_compress by itself."""
    points = metadata.entry_points(group="torch.backends")
    return os.environ.get(AUTOLOAD, "1") == "1" and "ds_compress" in points.names


def device() -> str:
    """What trains here."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def kernels() -> str | None:
    """The instruction set that the C++ kernels of this machine use; None where codecs run in PyTorch."""
    return library.instruction_set() if library.load() else None


def interfaces() -> list[dict[str, Any]]:
    """Those that are up: name, addresses, Mbit/s (0: it does not say) and bytes of a packet."""
    states = psutil.net_if_stats()
    return [
        {
            "name": name,
            "addresses": [each.address.partition("%")[0] for each in given if each.family in IP],
            "mbit": states[name].speed,
            "mtu": states[name].mtu,
        }
        for name, given in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    ]


def window() -> int | None:
    """Bytes that a TCP connection of this machine can have under way: what the system lets its buffers grow
    to, half of it where it receives, which is what it offers (tcp(7), tcp_adv_win_scale); None: it does not
    say."""
    try:
        most = [int((BUFFERS / name).read_text().split()[2]) for name in ("tcp_wmem", "tcp_rmem")]
    except (OSError, IndexError, ValueError):
        return None
    return min(most[0], most[1] // 2)


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return LOOPBACK
    return next((each["name"] for each in interfaces() if address in each["addresses"]), None)


def gloo_interface() -> tuple[str | None, str]:
    """The interface that gloo takes, and why: the one it is told, else the one whose address is that of this
    machine's name."""
    told = os.environ.get("GLOO_SOCKET_IFNAME")
    if told:
        return told, "GLOO_SOCKET_IFNAME"
    name = socket.gethostname()
    with suppress(OSError):
        for family, kind, *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with closing(socket.socket(family, kind)) as trial, suppress(OSError):
                trial.bind(where)
                return interface_of(str(where[0])), f"the name {name} is {where[0]}"
    return LOOPBACK, f"the name {name} is no address of this machine"


def way_to(address: str) -> str | None:
    """The interface over which this machine reaches `address`.

    Raises:
        CompressionError: there is no way.
    """
    try:
        family, kind, *_, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as trial:
            trial.connect(where)  # sends nothing: the system only looks for the way
            return interface_of(trial.getsockname()[0])
    except OSError as error:
        raise CompressionError(
            f"ds-compress doctor: no way from {socket.gethostname()} to rank 0 at {address}: {error}"
        ) from None
