"""Index coding: how a set of entries of a flat tensor travels.

All coders work on `count` distinct indices into `numel` entries, ascending, int64. Their size follows from `numel` and
`count` alone. Bits are packed little-endian: bit j of byte i belongs to entry 8*i + j; unused bits are zero.
"""

import numpy as np
import torch
from torch import Tensor

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def pack_bits(bits: Tensor) -> Tensor:
    """Bools [n] as uint8 [ceil(n / 8)]."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, device=bits.device)
    return (padded * weights).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` bits of uint8 [m] as bools."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))
    bits = packed.unsqueeze(1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (bits & 1).bool().flatten()[:numel]


def positions(mask: Tensor, count: int) -> Tensor:
    """Ascending int64 indices of the true entries of `mask` [n], of which there are `count`.

    Unlike `nonzero` it needs no look at the data on the host; entries beyond `count` are left out.
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy())[:count])
    rank = mask.cumsum(0)
    slot = torch.where(mask & (rank <= count), rank - 1, count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, slot, torch.arange(mask.numel(), device=mask.device))[:count]


class Bitmask:
    """One bit per entry of the tensor, set where the entry is kept."""

    @staticmethod
    def layout(numel: int, count: int) -> Layout:
        return (((-(-numel // 8),), torch.uint8),)

    @staticmethod
    def encode(indices: Tensor, numel: int) -> tuple[Tensor, ...]:
        mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
        return (pack_bits(mask.index_fill_(0, indices, True)),)

    @staticmethod
    def decode(parts: tuple[Tensor, ...], numel: int, count: int) -> Tensor:
        return positions(unpack_bits(parts[0], numel), count)


class Int32:
    """Each index as it is, in four bytes."""

    @staticmethod
    def layout(numel: int, count: int) -> Layout:
        return (((count,), torch.int32),)

    @staticmethod
    def encode(indices: Tensor, numel: int) -> tuple[Tensor, ...]:
        return (indices.to(torch.int32),)

    @staticmethod
    def decode(parts: tuple[Tensor, ...], numel: int, count: int) -> Tensor:
        return parts[0].long()


CODERS = {"bitmask": Bitmask, "int32": Int32}


def nbytes(name: str, numel: int, count: int) -> int:
    """Bytes that coder `name` takes for `count` of `numel` indices."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in CODERS[name].layout(numel, count))


def smallest(names: tuple[str, ...], numel: int, count: int) -> str:
    """The coder among `names` that takes the fewest bytes; the first of them where several do."""
    return min(names, key=lambda name: nbytes(name, numel, count))
