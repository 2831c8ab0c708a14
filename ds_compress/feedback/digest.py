"""Hashes of what boundaries remember: to see damage, and whether both sides still have the same."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WINDOW = 1 << 26
"""Bytes of mirrored state that one comparison in training reads, of each direction of a boundary: about
0.1 s."""


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


def window_digest(memories: Mapping[int, Mapping[str, Tensor]], direction: str, turn: int) -> int:
    """64-bit hash of what both sides have alike in `direction`: all of it up to `WINDOW` bytes, else that
    many of them, others at each `turn`, so that all is seen in so many turns.

    Of the rest, which may be the rows of a whole data set, only number and size are looked at. Both sides
    come upon their entries in the same order: that in which messages made them.
    """
    mirrored = [
        (position, key, value)
        for position, memory in sorted(memories.items())
        for key, value in memory.items()
        if key.startswith(f"{direction}/mirror/")
    ]
    total = sum(value.nbytes for _, _, value in mirrored)
    start = turn % max(1, -(-total // WINDOW)) * WINDOW
    digest = hashlib.blake2b(f"{len(mirrored)} {total}".encode(), digest_size=8)
    for position, key, value in mirrored:
        if start < value.nbytes and start > -WINDOW:
            part = value.detach().contiguous().flatten().view(torch.uint8)[max(start, 0) : start + WINDOW]
            absorb(digest.update, f"{position} {key} {tuple(value.shape)} {value.dtype}", part)
        start -= value.nbytes  # now from the beginning of the next entry
    return int.from_bytes(digest.digest(), "little", signed=True)
