"""Index coding: the formats in which the entries of a selection are sent.

Every coder encodes `count` of `numel` entries, distinct and ascending. The size of its payload follows from
these two numbers. `encode` writes to `out` if that is given.
"""

from functools import lru_cache
from typing import Any

import torch

from ds_compress.kernels.backends import kernels
from ds_compress.kernels.memory import Parts, copy_into
from ds_compress.kernels.topk.reference import as_mask
from ds_compress.kernels.topk.selection import Selection

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Bitmask:
    """One bit per entry of the tensor, set where the entry is kept."""

    @staticmethod
    def layout(numel: int, count: int) -> Layout:
        return (((-(-numel // 8),), torch.uint8),)

    @staticmethod
    def encode(selection: Selection, out: Parts | None = None) -> Parts:
        return (selection.bits if out is None else out[0].copy_(selection.bits),)

    @staticmethod
    def decode(parts: Parts, numel: int, count: int) -> Selection:
        return Selection.from_packet(parts[0], numel, count)


class Int32:
    """Each index as it is, in four bytes without a sign."""

    @staticmethod
    def layout(numel: int, count: int) -> Layout:
        return (((count,), torch.int32),)

    @staticmethod
    def encode(selection: Selection, out: Parts | None = None) -> Parts:
        indices = selection.indices
        return (indices.to(torch.int32) if out is None else out[0].copy_(indices),)

    @staticmethod
    def decode(parts: Parts, numel: int, count: int) -> Selection:
        return Selection.at(parts[0].long() & 0xFFFFFFFF, numel)


class Int16:
    """The low 16 bits of each index; of tensors longer than 65,536 also the number of indices per stretch.

    low bits:  int16 [count]                     counts:  int32 [ceil(numel / 65536)]
    """

    STRETCH = 1 << 16

    @classmethod
    def layout(cls, numel: int, count: int) -> Layout:
        low = ((count,), torch.int16)
        return (low,) if numel <= cls.STRETCH else (low, ((-(-numel // cls.STRETCH),), torch.int32))

    @classmethod
    def encode(cls, selection: Selection, out: Parts | None = None) -> Parts:
        indices = selection.indices
        low = indices.to(torch.int16) if out is None else out[0].copy_(indices)
        if selection.numel <= cls.STRETCH:
            return (low,)
        ends = torch.arange(
            0, selection.numel + cls.STRETCH, cls.STRETCH, dtype=torch.int64, device=indices.device
        )
        counts = torch.searchsorted(indices, ends).diff()
        return low, counts.to(torch.int32) if out is None else out[1].copy_(counts)

    @classmethod
    def decode(cls, parts: Parts, numel: int, count: int) -> Selection:
        low = parts[0].long() & (cls.STRETCH - 1)
        if numel > cls.STRETCH:
            starts = torch.arange(0, numel, cls.STRETCH, dtype=torch.int64, device=low.device)
            low.add_(torch.repeat_interleave(starts, parts[1].long(), output_size=count))
        return Selection.at(low, numel)


class Rice:
    """A Golomb-Rice code with parameter r, in the form of Elias (1974) and Fano (1971).

    The distances y_i = index_i - i never fall and never pass numel - count. Their low r bits are stored as r
    planes of one bit per index; y_i >> r is stored in unary, by setting bit (y_i >> r) + i of a bit string.
    Coding the gaps between the indices takes the same number of bits, but needs a running sum to decode.

        planes:  uint8 [r, ceil(count / 8)]    unary:  uint8 [ceil((count + ((numel - count) >> r)) / 8)]

    The unary length is that of the worst case, so the size is static: about r + 1 + (numel / count - 1) / 2^r
    bits per index, and r is chosen to make it least. At density 0.1 that is 5.125 bits; no code can average
    less than 4.69.
    """

    @staticmethod
    @lru_cache(maxsize=1024)
    def _parameter(numel: int, count: int) -> int:
        return min(range(numel.bit_length() + 1), key=lambda r: Rice._nbytes(r, numel, count))

    @staticmethod
    def _nbytes(r: int, numel: int, count: int) -> int:
        return r * -(-count // 8) + -(-Rice._unary_bits(r, numel, count) // 8)

    @staticmethod
    def _unary_bits(r: int, numel: int, count: int) -> int:
        return count + ((numel - count) >> r) if count else 0

    @staticmethod
    def layout(numel: int, count: int) -> Layout:
        r = Rice._parameter(numel, count)
        unary = -(-Rice._unary_bits(r, numel, count) // 8)
        return ((r, -(-count // 8)), torch.uint8), ((unary,), torch.uint8)

    @staticmethod
    def encode(selection: Selection, out: Parts | None = None) -> Parts:
        numel, count, indices = selection.numel, selection.count, selection.indices
        r = Rice._parameter(numel, count)
        order = torch.arange(count, dtype=torch.int64, device=indices.device)
        distance = indices - order
        low = distance.to(Rice._low_dtype(r))
        backend = kernels(indices.device)
        planes = [backend.pack_bits((low & (1 << bit)) != 0) for bit in range(r)]
        unary = as_mask((distance >> r).add_(order), Rice._unary_bits(r, numel, count))
        empty = torch.empty(0, -(-count // 8), dtype=torch.uint8, device=indices.device)
        return copy_into(out, (torch.stack(planes) if r else empty, backend.pack_bits(unary)))

    @staticmethod
    def decode(parts: Parts, numel: int, count: int) -> Selection:
        r = Rice._parameter(numel, count)
        planes, unary = parts
        backend = kernels(unary.device)
        order = torch.arange(count, dtype=torch.int64, device=unary.device)
        low = torch.zeros(count, dtype=Rice._low_dtype(r), device=unary.device)
        for bit in range(r):
            low |= backend.unpack_bits(planes[bit], count).to(low.dtype) << bit
        high = backend.list_bits(unary, Rice._unary_bits(r, numel, count), count) - order
        return Selection.at((high << r).bitwise_or_(low).add_(order), numel)

    @staticmethod
    def _low_dtype(r: int) -> torch.dtype:
        return torch.uint8 if r <= 8 else torch.int64


CODERS: dict[str, Any] = {"bitmask": Bitmask, "int16": Int16, "int32": Int32, "rice": Rice}


@lru_cache(maxsize=1024)  # a message has the shape of the one before
def nbytes(name: str, numel: int, count: int) -> int:
    """Return the bytes that coder `name` takes for `count` of `numel` indices."""
    layout = CODERS[name].layout(numel, count)
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)


@lru_cache(maxsize=1024)
def smallest(names: tuple[str, ...], numel: int, count: int) -> str:
    """Return the coder among `names` that takes the fewest bytes; of several the first."""
    return min(names, key=lambda name: nbytes(name, numel, count))
