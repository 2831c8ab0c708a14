"""64-bit ids of the samples in a micro-batch, made at the first stage from what the data loader returns.

An id is a hash of the sample's content or an index that the data set returns, never its position in an
epoch. So it survives shuffling, RepeatingLoader and data-parallel shards. Messages carry the ids to the later
stages.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import TensorSpec
from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import as_bytes


@dataclass(frozen=True)
class SampleIds:
    """Makes the ids of samples, and counts those of a message."""

    column: int | None = None
    """Place of an integer tensor [samples] in what the data loader returns; None: a hash of each sample's
    input."""
    per_batch: bool = False
    """One id for a whole micro-batch, of its samples in their order."""
    dim: int = 0
    """Dimension of the messages that counts the samples; unused with `per_batch`."""

    def count(self, specs: Sequence[TensorSpec]) -> int:
        """Return how many ids go with a message of tensors of `specs`."""
        if self.per_batch:
            return 1
        shape = next((spec.shape for spec in specs if spec.dtype.is_floating_point), ())
        if len(shape) <= self.dim:
            raise CompressionError(
                f"aqsgd: a message of shape {list(shape)} has no dimension {self.dim} of samples"
            )
        return shape[self.dim]

    def check(self, ids: Tensor | None, specs: Sequence[TensorSpec], boundary: int) -> None:
        """Refuse `ids` that are not as many as `count`.

        Raises:
            CompressionError: names what to change.
        """
        expected = self.count(specs)
        if ids is None or ids.numel() != expected:
            shape = next((list(spec.shape) for spec in specs if spec.dtype.is_floating_point), [])
            came = "none" if ids is None else ids.numel()
            raise CompressionError(
                f"aqsgd: boundary {boundary}: {came} sample ids came with a message of shape {shape}, "
                f"expected {expected}; see batch_dim, and switch off pipe_partitioned"
            )

    def of(self, batch: Sequence[Any]) -> Tensor:
        """Return int64 ids, on the CPU, for what the data loader returned: (inputs, labels, ...).

        Raises:
            CompressionError: there is no such column, or it is not one of integers.
        """
        if self.column is None:  # dim 0 of the inputs counts samples
            tensors = [batch[0]] if isinstance(batch[0], Tensor) else list(batch[0])
            ids = _hash_rows([each for each in tensors if each.dim() and len(each) == len(tensors[0])])
        else:
            ids = self._indices(batch)
        return _hash_rows([ids[None]]) if self.per_batch else ids

    def _indices(self, batch: Sequence[Any]) -> Tensor:
        number = self.column or 0  # 0 are the inputs themselves
        column = batch[number] if number < len(batch) else None
        if not isinstance(column, Tensor) or column.dim() != 1 or column.dtype.is_floating_point:
            came = f"{len(batch)} columns"
            if isinstance(column, Tensor):
                came = f"{column.dtype} {list(column.shape)}"
            raise CompressionError(
                f"aqsgd.ids.column: {self.column} of the data should hold integers [samples]; "
                f"the data loader returned {came}"
            )
        return column.to("cpu", torch.int64)


def _hash_rows(tensors: list[Tensor]) -> Tensor:
    """Return int64 [rows]: BLAKE2b of the bytes of each index of dim 0, over all `tensors`."""
    rows = tensors[0].shape[0]
    bytes_of = [as_bytes(t.detach().cpu()).view(rows, -1).numpy() for t in tensors]
    digests = [
        hashlib.blake2b(b"".join(each[row].tobytes() for each in bytes_of), digest_size=8).digest()
        for row in range(rows)
    ]
    ids = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    return torch.tensor(ids, dtype=torch.int64, device="cpu")
