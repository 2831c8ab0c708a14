"""Collect the facts of one machine: versions, compiled kernels, network interfaces."""

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

from ds_compress.autoload import HOOK
from ds_compress.errors import failures_at
from ds_compress.kernels import library
from ds_compress.version import __version__

LIBRARIES = ("torch", "deepspeed", "transformers")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
IP = (socket.AF_INET, socket.AF_INET6)
LOOPBACK = "lo"
SHARED = Path("/dev/shm")
SETTINGS = Path("/proc/sys/net/ipv4")
BUFFERS = "deepspeed_allreduce_buffer_*"
"""Shared memory of DeepSpeed's all-reduce on CPUs."""

Facts = dict[str, Any]


def facts(meeting_point: str | None = None) -> Facts:
    """Collect the facts of this machine, as JSON types.

    Args:
        meeting_point: address of rank 0; None outside of a launched job.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "ds_compress": __version__}
    for name in LIBRARIES:
        versions[name] = None
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions["torch"] = torch.__version__  # not every build has suffixes such as "+cpu" in its metadata
    points = metadata.entry_points(group="torch.backends")
    device = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    interface, why = gloo_interface()
    return {
        "host": socket.gethostname(),
        "versions": versions,
        # whether `import torch` loads ds_compress
        "switched_on": os.environ.get(AUTOLOAD, "1") == "1" and "ds_compress" in points.names,
        "hooks": os.environ.get(HOOK) != "0",  # whether it then looks for the key
        "device": device,
        # instruction set of the C++ kernels; None: codecs run in PyTorch
        "kernels": library.instruction_set() if library.load() else None,
        "interfaces": interfaces(),
        "gloo_interface": interface,
        "gloo_because": why,
        "way": outgoing_interface(meeting_point) if meeting_point else None,
        "congestion_control": tcp_setting("congestion_control"),
        "slow_start_after_idle": tcp_setting("slow_start_after_idle"),
        "left_buffers": left_buffers(),
    }


def tcp_setting(name: str) -> str:
    """Return a setting of Linux's TCP, such as "cubic" or "1"; empty if the system does not say it."""
    with suppress(OSError):
        return (SETTINGS / f"tcp_{name}").read_text().strip()
    return ""


def interfaces() -> list[dict[str, Any]]:
    """List the interfaces that are up: name, addresses, Mbit/s (0 if unknown) and MTU in bytes."""
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


def left_buffers() -> dict[str, int]:
    """Return the buffers of DeepSpeed's all-reduce that no process maps: bytes in memory, by path.

    A launch that was killed leaves them. Those of other users are left out: their processes cannot be read.
    """
    user, found = os.getuid(), dict[str, int]()
    for path in SHARED.glob(BUFFERS):
        with suppress(OSError):  # it may just have been removed
            state = path.stat()
            if user in (0, state.st_uid):
                found[str(path)] = 512 * state.st_blocks
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):
            for mapped in found.keys() & set(maps.read_text(errors="replace").split()):
                del found[mapped]
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if there is none."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return LOOPBACK
    return next((each["name"] for each in interfaces() if address in each["addresses"]), None)


def gloo_interface() -> tuple[str | None, str]:
    """Return the interface that gloo selects, and why.

    gloo takes GLOO_SOCKET_IFNAME if it is set, else the interface whose address the host name resolves to.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]  # of several, the first one
    if chosen:
        return chosen, "GLOO_SOCKET_IFNAME"
    name = socket.gethostname()
    with suppress(OSError):
        for family, kind, *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with closing(socket.socket(family, kind)) as trial, suppress(OSError):
                trial.bind(where)
                return interface_of(str(where[0])), f"the name {name} is {where[0]}"
    return LOOPBACK, f"the name {name} is no address of this machine"


def outgoing_interface(address: str) -> str | None:
    """Return the interface through which this machine reaches `address`.

    Raises:
        CompressionError: there is no route to it.
    """
    with failures_at(f"ds-compress doctor: no way from {socket.gethostname()} to rank 0 at {address}"):
        family, kind, *_, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as trial:
            trial.connect(where)  # sends nothing: the system only selects the route
            return interface_of(trial.getsockname()[0])
