"""Hashes of the state of boundaries, to find damage and differences between the two sides."""

import hashlib
from collections.abc import Callable, Mapping

from torch import Tensor

from ds_compress.kernels.memory import as_bytes

WINDOW = 1 << 26
"""Bytes of mirrored state that one comparison in training reads, of each direction of a boundary: about
0.1 s."""


def absorb(update: Callable[[bytes | memoryview], None], name: str, value: Tensor) -> None:
    """Add the name, shape, dtype and bytes of a tensor to the hash that `update` feeds."""
    update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
    update(as_bytes(value.detach().cpu()).numpy().data)


def mirror_digest(memories: Mapping[int, Mapping[str, Tensor]]) -> int:
    """Return a 64-bit hash of the mirrored state in a boundary's memory, by tensor position."""
    digest = hashlib.blake2b(digest_size=8)
    for position, memory in sorted(memories.items()):
        for key in sorted(memory):
            if "/mirror/" in key:
                absorb(digest.update, f"{position} {key}", memory[key])
    return int.from_bytes(digest.digest(), "little", signed=True)


def window_digest(memories: Mapping[int, Mapping[str, Tensor]], direction: str, turn: int) -> int:
    """Return a 64-bit hash of `WINDOW` bytes of the mirrored state of `direction`.

    Each `turn` reads the next window, so all state is read in some turns. Of the state outside the window,
    which may be the buffers of a whole data set, only number and size are hashed. Both sides have their
    entries in the same order: that of the messages that made them.
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
            part = as_bytes(value.detach())[max(start, 0) : start + WINDOW]
            absorb(digest.update, f"{position} {key} {tuple(value.shape)} {value.dtype}", part)
        start -= value.nbytes  # now from the beginning of the next entry
    return int.from_bytes(digest.digest(), "little", signed=True)
