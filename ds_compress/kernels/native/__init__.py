"""Kernels for CPU tensors in C++, compiled at installation.

Each has a bit-identical counterpart in PyTorch, which runs for small tensors and where nothing was compiled.
"""

import ctypes

import torch

from ds_compress.kernels import library as compiled
from ds_compress.kernels.memory import LARGE, keep_freed

LONG = 1 << 8
"""From so many entries on compiled kernels are used."""

_FP32 = torch.float32.itemsize  # whatever is made of an entry is at most that
_MUCH = LARGE // _FP32  # of fewer nothing has to be kept


def library(source: str) -> ctypes.CDLL | None:
    """The compiled functions, or None where there are none."""
    return compiled.load()


def serves(source: str, entries: int) -> bool:
    """Whether a CPU tensor of so many entries is worth a compiled kernel, and there is one."""
    if entries < LONG:
        return False
    if entries >= _MUCH:
        keep_freed(entries * _FP32)
    return library(source) is not None


__all__ = ["LONG", "library", "serves"]
