"""Memory: that of the CPU, which costs more than the arithmetic where it is new; and the lack of any."""

import ctypes
import threading
from functools import lru_cache

import torch
from torch import Tensor

_local = threading.local()

LARGE = 1 << 20  # bytes of a tensor from which on new memory is felt
_MAPPED = (
    1 << 25
)  # bytes from which on glibc maps a block by itself, at the most it comes to without being told

_kept = 0

_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory")  # drivers, torch, zstd


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory, of the host or of a device, is used up; often only its words do."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error).lower() for words in _EXHAUSTED)


@lru_cache  # a size that came before changes nothing
def retain_freed_memory(nbytes: int) -> None:
    """Let malloc of this process keep what is freed, up to blocks of `nbytes`, once that is much.

    By default it returns the end of the heap and blocks of 32 MiB to the system and gets them anew, page by
    page, for the next message: decoding 64 MiB then takes ten times as long. Messages have the same size at
    every step, so what one needed the next one needs too.
    """
    global _kept
    if nbytes < LARGE or nbytes < _kept:
        return
    _kept = max(_MAPPED, 1 << nbytes.bit_length())
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        libc.mallopt(mmap_threshold, min(_kept, 2**30))
        libc.mallopt(trim_threshold, 2**31 - 1)


@lru_cache
def empty_template(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `torch.empty_like` makes a tensor of the CPU of `shape` from, sooner than `torch.empty` has parsed
    its arguments; it has no memory for it itself."""
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory with anything in it, the same at every call of this thread for `role`: for what no caller gets
    to see."""
    buffers = _local.__dict__.setdefault("buffers", {})
    whole, *known, part = buffers.get(role, (None, None))
    if known == [shape, dtype]:  # as the message before
        return part
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if whole is None or whole.numel() < nbytes:
        whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    part = whole[:nbytes].view(dtype).view(shape)
    buffers[role] = whole, shape, dtype, part
    return part


def copy_into(out: tuple[Tensor, ...] | None, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy `parts` into the memory `out` and return it; without `out` return `parts`."""
    return parts if out is None else tuple(place.copy_(part) for place, part in zip(out, parts, strict=True))
