"""Where the buffers of single samples live: on the device, in host memory, or in a file mapped into
memory."""

import os
import tempfile
import weakref
from collections import deque
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

ROWS_PER_FILE = 1024
"""Maps are few (Linux allows 65,530 in a process), files are sparse."""


class Rows:
    """Reads and replaces rows of `ctx.memory`.

    Rows are replaced, never written to: whoever holds a copy of the memory keeps what was there. A place in
    the file is used again when the last holder of its row is gone.
    """

    def __init__(self, place: Literal["device", "host", "disk"], dtype: torch.dtype, folder: str | None):
        """`folder`: of the files of place "disk", None for the system's temporary folder."""
        self.place = place
        self.dtype = dtype
        self.folder = folder
        self._free: dict[int, deque[Tensor]] = {}
        self._reader = ThreadPoolExecutor(1, "ds_compress_rows") if place == "disk" else None

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """`rows`, at least one, as [rows, ...] of `dtype` on `device`."""
        pinned = self.place == "host" and device.type == "cuda"
        shape = (len(rows), *rows[0].shape)
        out = torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=True) if pinned else None
        return torch.stack(list(rows), out=out).to(device, non_blocking=True).to(dtype)

    def write(self, memory: MutableMapping[str, Tensor], keys: Sequence[str], values: Tensor) -> None:
        """Make `values` [rows, ...] the rows of `keys`; where a key comes twice, the last one counts."""
        pinned = values.is_cuda
        values = values.to(device=None if self.place == "device" else "cpu", dtype=self.dtype)
        for key, value in dict(zip(keys, values)).items():
            memory[key] = self._new(value, pinned).copy_(value)

    def adopt(self, memory: MutableMapping[str, Tensor], keys: Sequence[str]) -> None:
        """Bring rows that were read from a checkpoint to where rows live."""
        for key in keys:
            self.write(memory, [key], memory[key][None])

    def prefetch(self, rows: Sequence[Tensor]) -> None:
        """Have the operating system read rows from disk while the stage computes; returns at once."""
        if self._reader and rows:
            self._reader.submit(_touch, list(rows))

    def _new(self, like: Tensor, pinned: bool) -> Tensor:
        if self.place == "device":
            return torch.empty_like(like)
        if self.place == "host":
            return torch.empty(like.shape, dtype=self.dtype, device="cpu", pin_memory=pinned)
        free = self._free.setdefault(like.numel(), deque())
        if not free:
            free.extend(self._map(like.numel()))
        slot = free.popleft()
        row = slot.view(like.shape)
        weakref.finalize(row, free.append, slot)
        return row

    def _map(self, numel: int) -> Sequence[Tensor]:
        """Rows of a new file, which has no name from the start: it goes with the process, however that
        ends."""
        descriptor, path = tempfile.mkstemp(prefix="ds_compress_rows_", dir=self.folder)
        os.close(descriptor)
        try:
            mapped = torch.from_file(
                path, shared=True, size=ROWS_PER_FILE * numel, dtype=self.dtype, device="cpu"
            )
        finally:
            os.unlink(path)
        return mapped.view(ROWS_PER_FILE, numel).unbind()


def _touch(rows: list[Tensor]) -> None:
    for row in rows:
        row.view(torch.uint8).flatten()[::4096].sum()
