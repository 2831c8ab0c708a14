"""Bit strings: sets of entries of a flat tensor, one bit for each entry of it.

Bits are packed little-endian: bit j of byte i belongs to entry 8*i + j; unused bits are zero.
"""

import numpy as np
import torch
from torch import Tensor

from ds_compress.kernels import gpu, native
from ds_compress.kernels.native import selection


def on_cpu(tensor: Tensor) -> bool:
    """Whether numpy may do the work, and values cost no wait. A test that makes this false gets the plain
    torch of other devices."""
    return tensor.device.type == "cpu"


def pack_bits(bits: Tensor) -> Tensor:
    """Bools [n] as uint8 [ceil(n / 8)]."""
    if on_cpu(bits):
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    fused = gpu.kernels(bits.device)
    if fused:
        return fused.pack_bits(bits)
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.uint8).view(-1, 8)
    return (padded << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` bits of uint8 [m] as bools."""
    if on_cpu(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))
    fused = gpu.kernels(packed.device)
    if fused:
        return fused.unpack_bits(packed, numel)
    bits = packed.unsqueeze(1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (bits & 1).bool().flatten()[:numel]


def positions(mask: Tensor, count: int) -> Tensor:
    """Ascending int64 indices of the true entries of `mask` [n], of which there are `count`.

    Unlike `nonzero` it needs no look at the data on the host; entries beyond `count` are left out.
    """
    if on_cpu(mask):
        return torch.from_numpy(np.flatnonzero(mask.numpy())[:count])
    if gpu.kernels(mask.device):
        return list_bits(pack_bits(mask), mask.numel(), count)
    slot = torch.where(mask, mask.cumsum(0) - 1, count).clamp_(max=count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, slot, torch.arange(mask.numel(), dtype=torch.int64, device=mask.device))[:count]


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """uint8 [ceil(numel / 8)]: bits that are set at `indices`."""
    if native.serves("selection", indices.device, numel):
        return selection.set_bits(indices, numel)
    mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
    return pack_bits(mask.index_fill_(0, indices, True))


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """Ascending int64 indices of the set ones among the first `numel` bits of `packed`, of which there are
    `count`."""
    if native.serves("selection", packed.device, numel):
        return selection.list_bits(packed, numel, count)
    fused = gpu.kernels(packed.device)
    if fused:
        return fused.list_bits(packed, numel, count)
    return positions(unpack_bits(packed, numel), count)
