"""Calls of the C++ kernels, which are compiled at installation (see `library`).

Each has a bit-identical counterpart in PyTorch, which runs for small tensors and where nothing was compiled.
"""

from ds_compress.kernels import library

LONG = 1 << 8
"""Entries from which on compiled kernels are used."""


def serves(entries: int) -> bool:
    """Return whether compiled kernels are there, and a CPU tensor of so many entries is worth one."""
    return entries >= LONG and library.load() is not None
