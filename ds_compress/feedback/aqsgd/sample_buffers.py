"""Store the buffers of samples: on the device, or in host memory.

An epoch visits every sample once, so no sample deserves its buffer more than another. Evicting the least
recently used buffer for each new sample finds few again, or none: each is evicted before its next visit. So
buffers stay and new samples get none, until a buffer was not used for so long that its sample has left the
data. Messages alone decide, so both sides keep the same buffers.

    epochs        buffers for   hits here   hits of least recently used
    one order       50 %          50 %         0 %
    shuffled        50 %          50 %        16 %
    shuffled        90 %          90 %        67 %

Of 512 samples, in 8 epochs; tests/feedback/test_budget.py checks the hits here.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codecs.mixins import check_entry
from ds_compress.errors import CompressionError

UNUSED = 2
"""A buffer is unused after this many times the longest time between two visits of a sample so far. In
shuffled epochs a sample may stay away for nearly two epochs, and not in the first ones."""
UNKNOWN = 32
"""The same limit, in fillings of the budget, while samples have returned only after short times (`SHORT`)."""
SHORT = 0.25
"""Longest short time between two visits of a sample, in fillings of the budget."""


class BufferBudget:
    """Limits the bytes of the buffers in a memory.

    Buffers are in the memory in the order of their last visits. Each has the number of that visit as an
    attribute, so a copy of the memory has it too.
    """

    BYTES = "forward/mirror/host/aqsgd.bytes"
    """Entry of the memory, int64 [1]: bytes of all buffers."""
    VISITS = "forward/mirror/host/aqsgd.visits"
    """Entry of the memory, int64 [2]: visits so far; the most between two of the same sample."""
    ORDER = "forward/mirror/host/aqsgd.order"
    """Entry of checkpoints, whose own order is that of names: int64 [rows], places of the rows in the order
    of their last visits."""
    VISITED = "forward/mirror/host/aqsgd.visited"
    """Entry of checkpoints: int64 [rows], numbers of the last visits, in that order."""

    def __init__(self, most: int, prefix: str):
        """
        Args:
            most: bytes that the rows of a memory may take.
            prefix: of the keys of rows.
        """
        self.most = most
        self.prefix = prefix

    def write(
        self,
        memory: MutableMapping[str, Tensor],
        rows: Mapping[str, Tensor],
        make: Callable[[Tensor], Tensor],
    ) -> None:
        """Count a visit of each of `rows`, and store those that fit.

        Args:
            rows: by key, in the dtype that they are stored in.
            make: moves a row to where buffers are stored.
        """
        taken = int(memory[self.BYTES]) if self.BYTES in memory else 0
        visits, longest = memory[self.VISITS].tolist() if self.VISITS in memory else (0, 0)
        for key in sorted(rows, key=lambda key: key not in memory):  # known samples first: their buffers stay
            visits += 1
            if key in memory:
                row = memory.pop(key)  # a new key of a dict comes last
                taken -= row.nbytes
                longest = max(longest, visits - _visited(row))
            nbytes = rows[key].nbytes
            while taken + nbytes > self.most >= nbytes:
                oldest = next((key for key in memory if key.startswith(self.prefix)), None)
                if oldest is None or not self._is_unused(memory[oldest], visits, longest, nbytes):
                    break
                taken -= memory.pop(oldest).nbytes
            if taken + nbytes <= self.most:
                memory[key] = _marked(make(rows[key]), visits)
                taken += nbytes
        self._count(memory, taken, visits, longest)

    def _is_unused(self, row: Tensor, visits: int, longest: int, nbytes: int) -> bool:
        """Return whether the sample of `row` has left the data; `nbytes`: of a row."""
        fill = self.most // max(1, nbytes)
        limit = UNUSED * max(longest, fill) if longest >= SHORT * fill else UNKNOWN * fill
        return visits - _visited(row) > limit

    def _count(self, memory: MutableMapping[str, Tensor], taken: int, visits: int, longest: int) -> None:
        memory[self.BYTES] = torch.tensor([taken], dtype=torch.int64, device="cpu")
        memory[self.VISITS] = torch.tensor([visits, longest], dtype=torch.int64, device="cpu")

    def _keys(self, memory: Mapping[str, Tensor]) -> list[str]:
        return [key for key in memory if key.startswith(self.prefix)]

    def saved(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint holds beside the entries of `memory`."""
        keys = self._keys(memory)
        places = {key: place for place, key in enumerate(sorted(keys))}
        order, visited = [places[key] for key in keys], [_visited(memory[key]) for key in keys]
        return {
            self.ORDER: torch.tensor(order, dtype=torch.int64, device="cpu"),
            self.VISITED: torch.tensor(visited, dtype=torch.int64, device="cpu"),
        }

    def adopt(self, memory: MutableMapping[str, Tensor], make: Callable[[Tensor], Tensor]) -> None:
        """Put rows that were read from a checkpoint into their order; `make` as in `write`."""
        names = sorted(self._keys(memory))
        order = memory.pop(self.ORDER, torch.arange(len(names), dtype=torch.int64, device="cpu")).tolist()
        # older files have the order alone
        visited = memory.pop(self.VISITED, torch.arange(len(names), dtype=torch.int64, device="cpu")).tolist()
        memory.pop(self.BYTES, None)
        visits, longest = memory.pop(self.VISITS).tolist() if self.VISITS in memory else (len(names), 0)
        for place, number in zip(order, visited):
            memory[names[place]] = _marked(make(memory.pop(names[place])), number)
        self._count(memory, sum(memory[key].nbytes for key in names), visits, longest)

    def check(self, memory: Mapping[str, Tensor]) -> None:
        """Check entries just read from a checkpoint; see `Stateful.check_memory`."""
        rows = len(self._keys(memory))
        for key, shape in ((self.BYTES, 1), (self.VISITS, 2), (self.ORDER, rows), (self.VISITED, rows)):
            if key in memory:
                check_entry(key, memory[key], torch.int64, shape=(shape,))
        if self.ORDER in memory and sorted(memory[self.ORDER].tolist()) != list(range(rows)):
            raise CompressionError(f"entry {self.ORDER!r} is no order of {rows} rows")


def _marked(row: Tensor, visit: int) -> Tensor:
    row.visited = visit  # type: ignore[attr-defined]
    return row


def _visited(row: Tensor) -> int:
    return int(row.visited)  # type: ignore[attr-defined]


class SampleBuffers:
    """Reads and replaces the buffers in `ctx.memory`, one row for each sample.

    Rows are replaced, never overwritten, so a copy of the memory keeps its values.
    """

    def __init__(self, offload: Literal["none", "cpu"], dtype: torch.dtype, most: int | None = None):
        """
        Args:
            offload: where rows are stored, as in `aqsgd.Offload`.
            most: bytes that the rows of a memory may take, None for any number.
        """
        self.offload = offload
        self.dtype = dtype
        # "host" tells checkpoints not to bring the rows to the device
        self.prefix = f"forward/mirror/{'device' if offload == 'none' else 'host'}/aqsgd/"
        self._budget = None if most is None else BufferBudget(most, self.prefix)

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Stack `rows`, at least one, to [rows, ...] of `dtype` on `device`."""
        out = None
        if self.offload == "cpu" and device.type == "cuda":
            shape = len(rows), *rows[0].shape
            out = torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=True)
        return torch.stack(list(rows), out=out).to(device, non_blocking=True).to(dtype)

    def write(self, memory: MutableMapping[str, Tensor], keys: Sequence[str], values: Tensor) -> None:
        """Store `values` [rows, ...] under `keys`; of a key that comes twice, the last value."""
        pinned = values.is_cuda
        values = values.to(device=None if self.offload == "none" else "cpu", dtype=self.dtype)
        rows = dict(zip(keys, values))

        def make(value: Tensor) -> Tensor:
            return self._new(value, pinned).copy_(value)

        if self._budget is not None:
            self._budget.write(memory, rows, make)
        else:
            memory.update((key, make(value)) for key, value in rows.items())

    def keys(self, memory: Mapping[str, Tensor]) -> list[str]:
        """Return the keys of the rows, in the order of `memory`."""
        return [key for key in memory if key.startswith(self.prefix)]

    def saved(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint holds beside the entries of `memory`."""
        return {} if self._budget is None else self._budget.saved(memory)

    def adopt(self, memory: MutableMapping[str, Tensor]) -> None:
        """Move rows that were read from a checkpoint to where rows are stored."""
        if self._budget is not None:
            self._budget.adopt(memory, self._moved)
        else:
            memory.update((key, self._moved(memory[key])) for key in self.keys(memory))

    def _moved(self, row: Tensor) -> Tensor:
        """Copy a row to where rows are stored."""
        value = row.to(device=None if self.offload == "none" else "cpu", dtype=self.dtype)
        return self._new(value, row.is_cuda).copy_(value)

    def check(self, memory: Mapping[str, Tensor]) -> None:
        """Check rows just read from a checkpoint; see `Stateful.check_memory`."""
        for key in self.keys(memory):
            check_entry(key, memory[key], self.dtype)
        if self._budget is not None:
            self._budget.check(memory)

    def _new(self, like: Tensor, pinned: bool) -> Tensor:
        if self.offload == "none" or not like.numel():
            return torch.empty_like(like)
        return torch.empty(like.shape, dtype=self.dtype, device="cpu", pin_memory=pinned)
