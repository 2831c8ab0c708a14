"""Store the buffers of samples: on the device, or in host memory."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codecs.mixins import check_entry
from ds_compress.errors import CompressionError


class SampleBuffers:
    """Reads and replaces the buffers in `ctx.memory`, one row for each sample.

    Rows are replaced, never overwritten, so a copy of the memory keeps its values.
    """

    def __init__(self, offload: Literal["none", "cpu"], dtype: torch.dtype, max_gb: float | None = None):
        """
        Args:
            offload: where rows are stored, as in `aqsgd.Offload`.
            max_gb: GB that the rows of a memory may take, None for any number.
        """
        self.offload = offload
        self.dtype = dtype
        # "host" tells checkpoints not to bring the rows to the device
        self.prefix = f"forward/mirror/{'device' if offload == 'none' else 'host'}/aqsgd/"
        self._max_gb = max_gb

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Stack `rows`, at least one, to [rows, ...] of `dtype` on `device`."""
        out = None
        if self.offload == "cpu" and device.type == "cuda":
            shape = len(rows), *rows[0].shape
            out = torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=True)
        return torch.stack(list(rows), out=out).to(device, non_blocking=True).to(dtype)

    def write(self, memory: MutableMapping[str, Tensor], keys: Sequence[str], values: Tensor) -> None:
        """Store `values` [rows, ...] under `keys`; of a key that comes twice, the last value.

        Raises:
            CompressionError: the rows of the memory, counted as large as these, take more than `max_gb`.
        """
        pinned = values.is_cuda
        values = values.to(device=None if self.offload == "none" else "cpu", dtype=self.dtype)
        rows = dict(zip(keys, values))
        count = len(memory) + sum(key not in memory for key in rows)
        if self._max_gb is not None and rows and count * values[0].nbytes > self._max_gb * 1e9:
            raise CompressionError(
                f"aqsgd.max_gb: {self._max_gb:g} GB are not enough for the buffers of {count:,} samples of "
                f"{values[0].nbytes:,} bytes; give more, or use another feedback"
            )
        memory.update((key, self._new(value, pinned).copy_(value)) for key, value in rows.items())

    def keys(self, memory: Mapping[str, Tensor]) -> list[str]:
        """Return the keys of the rows, in the order of `memory`."""
        return [key for key in memory if key.startswith(self.prefix)]

    def adopt(self, memory: MutableMapping[str, Tensor]) -> None:
        """Move rows that were read from a checkpoint to where rows are stored."""
        memory.update((key, self._moved(memory[key])) for key in self.keys(memory))

    def _moved(self, row: Tensor) -> Tensor:
        """Copy a row to where rows are stored."""
        value = row.to(device=None if self.offload == "none" else "cpu", dtype=self.dtype)
        return self._new(value, row.is_cuda).copy_(value)

    def check(self, memory: Mapping[str, Tensor]) -> None:
        """Check rows just read from a checkpoint; see `Stateful.check_memory`."""
        for key in self.keys(memory):
            check_entry(key, memory[key], self.dtype)

    def _new(self, like: Tensor, pinned: bool) -> Tensor:
        if self.offload == "none" or not like.numel():
            return torch.empty_like(like)
        return torch.empty(like.shape, dtype=self.dtype, device="cpu", pin_memory=pinned)
