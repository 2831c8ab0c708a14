"""Memory of the CPU, which costs more than the arithmetic where it is new."""

import ctypes
from functools import lru_cache

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
