"""Memory of the CPU, which costs more than the arithmetic where it is new."""

import ctypes
import threading
from functools import lru_cache

import torch
from torch import Tensor

_local = threading.local()

LARGE = 32 << 20
"""Bytes above which glibc maps every block afresh."""


def keep_freed(nbytes: int) -> None:
    """Let malloc of this process keep what is freed, once a tensor of `nbytes` is large.

    By default it returns large blocks to the system at once and gets them anew, page by page, for the next message:
    decoding 64 MiB then takes ten times as long. Messages have the same size at every step, so what one needed the
    next one needs too.
    """
    if nbytes > LARGE:
        _never_trim()


@lru_cache(maxsize=1)
def _never_trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory with anything in it, the same at every call of this thread for `role`: for what no caller gets to see."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    buffers = _local.__dict__.setdefault("buffers", {})
    if role not in buffers or buffers[role].numel() < nbytes:
        buffers[role] = torch.empty(nbytes, dtype=torch.uint8)
    return buffers[role][:nbytes].view(dtype).view(shape)
