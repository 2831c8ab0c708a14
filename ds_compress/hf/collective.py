"""Collectives of a run beside DeepSpeed's: integers, bytes, and an error raised on all ranks."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.transport import staging
from ds_compress.transport.collectives import all_gather


def gather_integers(value: int, group: Any = None) -> list[int]:
    """Return the integers (up to 63 bits) of all ranks of `group`, None: of the job, in rank order."""
    device = get_accelerator().current_device_name()
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    return [int(each) for each in all_gather(mine, group)]


def gather_digests(data: Any, group: Any = None) -> list[int]:
    """Return a hash of the bytes, or the array, that each rank of `group` has, in rank order."""
    return gather_integers(int.from_bytes(hashlib.sha256(data).digest()[:7], "little"), group)


def broadcast_bytes(data: bytes, size: int, source: int) -> bytes:
    """Send `size` bytes, 1 at least, from rank `source` to all."""
    device = get_accelerator().current_device_name()
    if dist.get_rank() == source:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source)
    return bytes(buffer.cpu().numpy())


def send_bytes(data: bytes, size: int, source: int, target: int) -> bytes:
    """Send `size` bytes, 1 at least, from rank `source` to rank `target`; every rank calls it.

    Returns:
        The bytes on `target`; on ranks that have no part in it, nothing.
    """
    device, rank = get_accelerator().current_device_name(), dist.get_rank()
    if staging.is_needed(torch.device(device)):  # gloo broadcasts memory of a GPU, but does not send it
        return broadcast_bytes(data, size, source)
    if rank == source:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), target)
    elif rank == target:
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(buffer, source)
        return bytes(buffer.cpu().numpy())
    return b""


@contextmanager
def raised_on_all_ranks() -> Iterator[None]:
    """Raise an error of one rank on every rank; all of them enter, and leave, together.

    Without it the others would wait in the next collective, and blame the network when that rank has ended.
    The body has no collective of its own: a rank that fails would miss it.

    Raises:
        CompressionError: another rank has failed: its line, and its number. A rank that failed itself raises
            its own error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    line = str(failure) if isinstance(failure, CompressionError) else failure and in_one_line(failure)
    data = (line or "").encode(errors="replace")
    sizes = gather_integers(len(data))
    first = next((rank for rank, size in enumerate(sizes) if size), None)
    if first is not None:
        said = broadcast_bytes(data, sizes[first], first)
        raise failure or CompressionError(f"{said.decode()} [rank {first}]")
