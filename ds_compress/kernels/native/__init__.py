"""Passes over CPU tensors in C++: a thread beside training compiles each source here, once for a machine.

Every one has a plain counterpart in torch that gives the same bits: it serves until the library is there, and
for good where the compiler fails.
"""

import torch

from ds_compress.kernels.memory import LARGE, keep_freed
from ds_compress.kernels.native.loader import SOURCES, ask, loaded, wait

LONG = 1 << 8
"""From so many entries on compiled passes are used."""

_FP32 = torch.float32.itemsize  # whatever is made of an entry is at most that
_MUCH = LARGE // _FP32  # of fewer nothing has to be kept

library = loaded.get
"""The compiled functions of a source, or None where they are not there."""


def serves(source: str, entries: int) -> bool:
    """Whether a tensor of the CPU of so many entries is worth it, and `source` is there."""
    if entries < LONG:
        return False
    if entries >= _MUCH:
        keep_freed(entries * _FP32)
    return library(source) is not None or ask(source) is not None


def prepare() -> None:
    """Start to load or to compile all of them, before the first message needs one."""
    for source in SOURCES:
        ask(source)


__all__ = ["LONG", "library", "prepare", "serves", "wait"]
