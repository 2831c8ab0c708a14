"""Move packets through pinned memory of the host, where torch.distributed cannot read a device's.

    send      codec stream: packet -> host memory, event
              thread: waits for the event, then sends from there
    receive   thread: waits until the memory is free, posts the receive
              codec stream: host memory -> packet

The thread keeps the caller from waiting for the device. It belongs to one end of a channel, so the packets of
the channel stay in order, and no channel waits for another.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Work

from ds_compress.transport import packet_parts
from ds_compress.transport.packet_parts import Parts

NEED_HOST_MEMORY = ("gloo",)
"""Backends whose send and recv take no device memory; their collectives do."""


def is_needed(device: torch.device) -> bool:
    """Return whether the default process group cannot send and receive memory of `device`."""
    if device.type == "cpu":
        return False
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(device.type) in NEED_HOST_MEMORY


def receives_hold_device(device: torch.device) -> bool:
    """Return whether a posted receive occupies `device` until its packet comes, as NCCL's does: a kernel that
    spins."""
    return device.type != "cpu" and not is_needed(device)


def transport_for(device: torch.device) -> "ModuleType | Staging":
    """Return what has `isend` and `irecv` for memory of `device`: `packet_parts`, or a new `Staging`."""
    return Staging(device) if is_needed(device) else packet_parts


class _Buffer(NamedTuple):
    memory: Tensor  # pinned
    unused: Any  # the event after which the device no longer uses it


class Staged:
    """A transfer through host memory; replaces a `torch.distributed.Work`."""

    def __init__(self, started: "Future[Work | Parts]", finish: Callable[[], None]):
        self._started = started
        self._finish = finish

    def wait(self, timeout: timedelta) -> None:
        """Return when the bytes have left or come; the device may not have finished copying them."""
        self._started.result().wait(timeout)
        self._finish()


class Staging:
    """`isend` and `irecv` of `packet_parts` for uint8 tensors on a device, for one end of one channel."""

    def __init__(self, device: torch.device):
        module = torch.get_device_module(device)
        # blocking: the thread sleeps until the device is done instead of keeping a core busy
        self._event = functools.partial(module.Event, blocking=True)
        # a new thread would use the first device, and make a context there
        self._thread = ThreadPoolExecutor(1, "ds_compress_staging", module.set_device, (device,))
        self._free: list[_Buffer] = []

    def isend(self, tensor: Tensor, peer: int, groups: Sequence[Any]) -> Staged:
        buffer = self._buffer(tensor.numel())
        buffer.memory.copy_(tensor, non_blocking=True)
        buffer.unused.record()
        started = self._thread.submit(self._start, packet_parts.isend, buffer, peer, groups)
        return Staged(started, lambda: self._free.append(buffer))

    def irecv(self, tensor: Tensor, peer: int, groups: Sequence[Any]) -> Staged:
        buffer = self._buffer(tensor.numel())

        def finish() -> None:
            tensor.copy_(buffer.memory, non_blocking=True)
            buffer.unused.record()
            self._free.append(buffer)

        return Staged(self._thread.submit(self._start, packet_parts.irecv, buffer, peer, groups), finish)

    @staticmethod
    def _start(
        transfer: Callable[..., Work | Parts], buffer: _Buffer, peer: int, groups: Sequence[Any]
    ) -> Work | Parts:
        buffer.unused.synchronize()
        return transfer(buffer.memory, peer, groups)

    def _buffer(self, nbytes: int) -> _Buffer:
        # Not kept by size, as in `Sender.memory`
        self._free = [buffer for buffer in self._free if buffer.memory.numel() == nbytes]
        return self._free.pop(0) if self._free else _Buffer(pinned(nbytes), self._event())


@torch.inference_mode(False)  # as `new_packet`
def pinned(nbytes: int) -> Tensor:
    """Return uint8 memory of the host that the device copies to and from by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
