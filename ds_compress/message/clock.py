"""Measure time on the device that does the work: CUDA events on a GPU, else the clock of the host.

Setting a mark does not synchronise; `ms` does.
"""

import time
from typing import Any

import torch


class HostClock:
    """Marks are readings of the host's clock: right where calls return when their work is done."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds from `start` to `end`."""
        return (end - start) * 1e3


class CudaClock(HostClock):
    """Marks are CUDA events on the current stream of a device, so the time of the stream counts, not that of
    the host."""

    def __init__(self, device: torch.device):
        """Measure on `device`, which need not be the current one."""
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> HostClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
