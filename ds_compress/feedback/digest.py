"""Hashes of what boundaries remember: to see damage, and whether both sides still have the same."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def absorb(update: Callable[[bytes | memoryview], None], name: str, value: Tensor) -> None:
    """Add a tensor to the hash that `update` feeds: its name, shape, dtype and bytes."""
    update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
    update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def mirror_digest(memories: Mapping[int, Mapping[str, Tensor]]) -> int:
    """64-bit hash of all that both sides of a boundary should have alike, from its memory by tensor
    position."""
    digest = hashlib.blake2b(digest_size=8)
    for position, memory in sorted(memories.items()):
        for key in sorted(memory):
            if "/mirror/" in key:
                absorb(digest.update, f"{position} {key}", memory[key])
    return int.from_bytes(digest.digest(), "little", signed=True)
