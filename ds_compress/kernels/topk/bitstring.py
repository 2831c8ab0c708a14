"""Bit strings: sets of entries of a flat tensor, one bit for each entry of it.

Bits are packed little-endian: bit j of byte i belongs to entry 8*i + j; unused bits are zero.
"""

import torch
from torch import Tensor


def pack_bits(bits: Tensor) -> Tensor:
    """Bools [n] as uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.uint8).view(-1, 8)
    return (padded << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` bits of uint8 [m] as bools."""
    bits = packed.unsqueeze(1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (bits & 1).bool().flatten()[:numel]


def positions(mask: Tensor, count: int) -> Tensor:
    """Ascending int64 indices of the true entries of `mask` [n], of which there are `count`.

    Unlike `nonzero` it needs no look at the data on the host; entries beyond `count` are left out.
    """
    slot = torch.where(mask, mask.cumsum(0) - 1, count).clamp_(max=count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, slot, torch.arange(mask.numel(), dtype=torch.int64, device=mask.device))[:count]


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """uint8 [ceil(numel / 8)]: bits that are set at `indices`, int64 [count]."""
    return pack_bits(marked(indices, numel))


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """Ascending int64 indices of the set ones among the first `numel` bits of `packed`, of which there are
    `count`."""
    return positions(unpack_bits(packed, numel), count)


def marked(indices: Tensor, numel: int) -> Tensor:
    """Bools [numel], true at `indices`, int64 [count]."""
    mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
    return mask.index_fill_(0, indices, True)
