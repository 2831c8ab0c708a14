"""Bit strings in numpy, and long ones in C++."""

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.topk import compiled_selection as compiled
from ds_compress.kernels.topk.bitstring import marked


def pack_bits(bits: Tensor) -> Tensor:
    """See `reference.pack_bits`."""
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """See `reference.unpack_bits`."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))


def positions(mask: Tensor, count: int) -> Tensor:
    """See `reference.bitstring.positions`."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())[:count])


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """See `reference.set_bits`."""
    if native.serves("selection", numel):
        return compiled.set_bits(indices, numel)
    return pack_bits(marked(indices, numel))


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.list_bits`."""
    if native.serves("selection", numel):
        return compiled.list_bits(packed, numel, count)
    return positions(unpack_bits(packed, numel), count)
