"""Where the codecs of a boundary work: beside the device's compute stream, or in line.

    compute   forward 1 | forward 2 | ..                        .. | forward 3
    lane                  encode 1, hand it to the link | take packet 3, decode it

One lane serves both directions of a boundary, so all that its codecs remember is made, used and freed in the
order in which the host asks, and only a message's tensors pass between lane and compute stream. That order
loses nothing: an encoding is asked for before any receipt that the forward or backward pass it comes from did
not wait for itself.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Lane:
    """In line: work is done when the call returns. What a CPU needs."""

    def run(self, work: Callable[[], Made], *, takes: Iterable[Tensor] = (), gives: bool = False) -> Made:
        """What `work()` returns.

        Args:
            takes: tensors it reads that the caller may free while it runs.
            gives: whether it returns tensors that the caller goes on to use.
        """
        return work()

    def join(self) -> None:
        """Let what the caller does next come after everything done here."""


class StreamLane(Lane):
    """On a stream of its own. It waits for what the caller has put on the compute stream so far; the compute
    stream waits for it only when work gives tensors, and the host never does."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    def run(self, work: Callable[[], Made], *, takes: Iterable[Tensor] = (), gives: bool = False) -> Made:
        compute = self._streams.current_stream(self._device)
        self._stream.wait_stream(compute)
        for tensor in takes:
            # else the allocator gives its memory to others as soon as the compute stream is done with it
            tensor.record_stream(self._stream)
        with self._streams.stream(self._stream):
            made = work()
        if gives:
            # what the lane allocated needs no such care: it allocates nothing before it waited for `compute`
            compute.wait_stream(self._stream)
        return made

    def join(self) -> None:
        self._streams.current_stream(self._device).wait_stream(self._stream)


def lane_for(device: torch.device) -> Lane:
    """A new lane on `device`."""
    return StreamLane(device) if device.type == "cuda" else Lane()
