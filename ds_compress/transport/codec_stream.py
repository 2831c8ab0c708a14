"""Run the codecs of a boundary: on a stream of their own beside the compute stream, or in line.

    compute        forward 1 | forward 2 | ..                        .. | forward 3
    codec stream               encode 1, hand it to the link | take packet 3, decode it

One codec stream serves both directions of a boundary. So all that its codecs remember is made, used and freed
in the order in which the host asks, and only the tensors of messages pass between it and the compute stream.
This order adds no wait: the host requests each encoding before every receipt, except those that the pass
which made the message needed itself.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")

AUTOCAST = "cpu", "cuda"
"""Devices of which a program may have switched it on."""


@contextmanager
def without_autocast() -> Iterator[None]:
    """Do work of codecs as if the program did not train within `torch.autocast`: their products would have 16
    bits, and it refuses to join bf16 and fp16.
    """
    with ExitStack() as stack:
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class CodecStream:
    """In line: work is done when the call returns, without autocast. What a CPU needs."""

    def run(self, work: Callable[[], Made], *, takes: Iterable[Tensor] = (), gives: bool = False) -> Made:
        """Return what `work()` returns.

        Args:
            work: a function without arguments.
            takes: tensors it reads that the caller may free while it runs.
            gives: whether it returns tensors that the caller goes on to use.
        """
        if not any(map(torch.is_autocast_enabled, AUTOCAST)):  # to enter a context takes 2 us
            return work()
        with without_autocast():
            return work()

    def join(self) -> None:
        """Let what the caller does next come after everything done here."""


class DeviceCodecStream(CodecStream):
    """A stream of a device. It waits for what the caller has put on the compute stream so far. The compute
    stream waits for it only when work gives tensors, and the host never does."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    def run(self, work: Callable[[], Made], *, takes: Iterable[Tensor] = (), gives: bool = False) -> Made:
        compute = self._streams.current_stream(self._device)
        self._stream.wait_stream(compute)
        for tensor in takes:
            # else the allocator reuses its memory as soon as the compute stream is done with it
            tensor.record_stream(self._stream)
        with self._streams.stream(self._stream):
            made = super().run(work)
        if gives:
            # what was allocated here needs no such care: nothing is before this stream waited for `compute`
            compute.wait_stream(self._stream)
        return made

    def join(self) -> None:
        self._streams.current_stream(self._device).wait_stream(self._stream)


def codec_stream_for(device: torch.device) -> CodecStream:
    """Make a codec stream on `device`."""
    return DeviceCodecStream(device) if device.type == "cuda" else CodecStream()
