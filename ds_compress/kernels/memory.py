"""Reuse memory of the CPU, as new pages cost more time than arithmetic; recognise errors of memory, and of
devices."""

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ds_compress.errors import CompressionError

Parts = tuple[Tensor, ...]
"""Payload tensors, in the order of the layout."""

_local = threading.local()

LARGE = 1 << 20
"""Bytes of a tensor from which on new memory costs noticeable time."""

_MAPPED = 1 << 25
"""Bytes: the largest value that glibc chooses by itself for its mmap threshold."""

FRAGMENTS = 64
"""Gaps between blocks may take the memory of so many of the largest messages: 54 were measured with stages of
two layers, 2,048 tokens and a width of 8,192."""

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""What the container that this process runs in may use, in bytes, or "max"."""

_kept = 0

_OF_DEVICE = "CUDA error", "Error [CUDA]", "unhandled cuda error"  # torch, Triton, NCCL

_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory")  # drivers, torch, zstd


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory of the host or of a device is used up.

    Often only the text of the error tells.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error).lower() for words in _EXHAUSTED)


def is_of_this_rank(error: BaseException) -> bool:
    """Return whether `error` says that memory is used up, or that this rank's own device failed.

    A device fails at a kernel of the model, say, and its error shows up in whatever is called next.
    """
    return is_out_of_memory(error) or any(words in str(error) for words in _OF_DEVICE)


@lru_cache  # a size that came before changes nothing
def retain_freed_memory(nbytes: int) -> None:
    """Let glibc's malloc reuse freed blocks of up to `nbytes` in this process; nothing below `LARGE`.

    By default glibc returns the end of the heap and blocks of 32 MiB to the system. The next message gets
    them again page by page: decoding 64 MiB then takes ten times as long. Messages have the same size at
    every step, so the next one needs the same blocks. Larger ones are left to glibc if the gaps between
    blocks might take more than this rank's share of half of the memory.
    """
    global _kept
    if nbytes < LARGE or nbytes < _kept or FRAGMENTS * nbytes > _memory_of_rank() / 2:
        return
    _kept = max(_MAPPED, 1 << nbytes.bit_length())
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        libc.mallopt(mmap_threshold, min(_kept, 2**30))
        libc.mallopt(trim_threshold, 2**31 - 1)


def _memory_of_rank() -> float:
    """Return bytes of this host, or container, for each of the ranks that the launcher started here."""
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else ""
    total = min(psutil.virtual_memory().total, int(limit) if limit.isdigit() else 1 << 63)
    ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or ""
    return total / (int(ranks) if ranks.isdigit() and int(ranks) else 1)


@lru_cache
def empty_template(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of `shape` without memory of its own, for `torch.empty_like`.

    `torch.empty` takes longer, as it parses its arguments.
    """
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


def scratch(role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory, the same at every call of this thread for `role`.

    It is for intermediate results: no caller may return it.
    """
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


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of `x`, uint8 [bytes], without a copy if it is contiguous.

    A tensor of one column is contiguous whatever its strides are, and torch views only some of them as bytes.
    """
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def copy_into(out: Parts | None, parts: Parts) -> Parts:
    """Copy `parts` into the memory `out` and return it; without `out` return `parts`."""
    return parts if out is None else tuple(place.copy_(part) for place, part in zip(out, parts, strict=True))


def fill(destinations: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy payload tensors to `destinations`, unless they are there already.

    Raises:
        CompressionError: the number of parts, or the shape or dtype of one, is not that of the layout.
    """
    if len(parts) != len(destinations):
        raise CompressionError(
            f"packet: {len(parts)} payload tensors came, the layout has {len(destinations)}"
        )
    for destination, part in zip(destinations, parts):
        if part is destination:
            continue
        if part.shape != destination.shape or part.dtype != destination.dtype:
            raise CompressionError(
                f"packet: payload of {tuple(part.shape)} {part.dtype} came, "
                f"the layout says {tuple(destination.shape)} {destination.dtype}"
            )
        destination.copy_(part)
