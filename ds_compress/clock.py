"""Times on the device that does the work: CUDA events on a GPU, the host's clock elsewhere.

A mark is a point in time that costs no synchronisation to set; `ms` is for when the numbers are wanted.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class HostClock:
    """Marks are readings of the host's clock: right where calls return when their work is done."""

    def __init__(self):
        self._waiter: ThreadPoolExecutor | None = None

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from `start` to `end`."""
        return (end - start) * 1e3

    def watch(self, work: Any) -> tuple[Any, Callable[[], Any]]:
        """`work` of an asynchronous transfer to use in its place, and a function that gives the mark of its end.

        gloo completes a transfer only inside `wait`, and lets nobody else wait for it: a thread does, one transfer
        after the other.
        """
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds_compress_clock")
        ended = self._waiter.submit(self._end_of, work)
        return _Watched(ended), ended.result

    def _end_of(self, work: Any) -> float:
        work.wait()
        return self.mark()


class _Watched:
    """The part of `torch.distributed.Work` that a link uses."""

    def __init__(self, ended: Future):
        self._ended = ended

    def is_completed(self) -> bool:
        return self._ended.done()

    def wait(self) -> None:
        self._ended.result()


class CudaClock(HostClock):
    """Marks are CUDA events on the current stream."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._beside = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    def watch(self, work: Any) -> tuple[Any, Callable[[], Any]]:
        """NCCL's `wait` blocks the current stream, not the host: a stream of our own waits and takes the time."""
        with torch.cuda.stream(self._beside):
            work.wait()
            end = self.mark()
        return work, lambda: end


def clock_for(device: torch.device) -> HostClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
