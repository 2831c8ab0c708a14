"""Calls of the C++ kernels, which are compiled at installation (see `library`).

Each has a bit-identical counterpart in PyTorch, which runs for small tensors and where nothing was compiled.
"""

import torch

from ds_compress.kernels import library
from ds_compress.kernels.memory import LARGE, retain_freed_memory

LONG = 1 << 8
"""Entries from which on compiled kernels are used."""

_FP32 = torch.float32.itemsize  # the largest type of what is made of an entry
_MANY = LARGE // _FP32


def serves(entries: int) -> bool:
    """Return whether compiled kernels are there, and a CPU tensor of so many entries is worth one."""
    if entries < LONG:
        return False
    if entries >= _MANY:
        retain_freed_memory(entries * _FP32)
    return library.load() is not None
