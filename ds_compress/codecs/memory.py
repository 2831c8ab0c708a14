"""What a codec that leaves entries in `ctx.memory` promises about them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ds_compress.errors import CompressionError


class Remembers(ABC):
    """Leaves entries in the memory, which checkpoints carry along."""

    @abstractmethod
    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Look at `memory`, just read from a checkpoint.

        Raises:
            CompressionError: an entry in the name of this codec is none that it could have left.
        """


def expect(key: str, value: Tensor, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    """Refuse the entry `value` unless it has one of `dtypes`, and `shape` where that is known.

    Raises:
        CompressionError: names the entry, what came and what was expected.
    """
    if value.dtype not in dtypes or (shape is not None and tuple(value.shape) != shape):
        allowed = " or ".join(map(str, dtypes)) + (f" {list(shape)}" if shape is not None else "")
        raise CompressionError(f"entry {key!r} is {value.dtype} {list(value.shape)}, expected {allowed}")


def number(digits: str) -> int:
    """The size that a part of a key tells; -1, which no size is, where it tells none."""
    return int(digits) if digits.isdecimal() else -1
