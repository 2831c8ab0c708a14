"""Codes of 1 to 8 bits, packed with exactly that many bits each.

The codes of a group are packed among themselves, plane by plane. With b in {1, 2, 4, 8} there are P = 8 / b
planes; plane i is the i-th run of G / P codes, and byte j of the group takes bits from code j of every plane:

    group of G codes, b = 4     | plane 0: c[0] ... c[G/2-1] | plane 1: c[G/2] ... c[G-1] |

    byte j   bit 7 6 5 4         3 2 1 0
                 c[G/2 + j]      c[j]             that is  OR over i of  c[i*G/P + j] << (b*i)

So packing and unpacking touch contiguous runs only: coalesced on a GPU, vectorised on a CPU. Any other width
is cut into pieces of those widths, low bits first, and each piece packed as above, one behind the other:

    group of G codes, b = 7 = 4 + 2 + 1

    | bits 0-3 of every code: G/2 bytes | bits 4-5: G/4 bytes | bit 6: G/8 bytes |
"""

from functools import lru_cache

import torch
from torch import Tensor

_PIECES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


@lru_cache
def packed_size(count: int, bits: int) -> int:
    """Return the bytes of `count` codes, a multiple of 8, of `bits` bits."""
    return count * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [groups, G], each below 2^bits, to uint8 [groups, G * bits / 8]; G is a multiple of
    8."""
    pieces = _PIECES[bits]
    if len(pieces) == 1:
        return _pack_planes(codes, bits)
    packed, shift = [], 0
    for width in pieces:
        packed.append(_pack_planes((codes >> shift) & (2**width - 1), width))
        shift += width
    return torch.cat(packed, dim=1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`: return uint8 [groups, G] of `packed`, uint8 [groups, G * bits / 8]."""
    pieces = _PIECES[bits]
    if len(pieces) == 1:
        return _unpack_planes(packed, bits)
    unit = packed.shape[1] // bits  # bytes that one bit of every code takes
    first, *others = packed.split([unit * width for width in pieces], dim=1)
    codes, shift = _unpack_planes(first, pieces[0]), pieces[0]
    for piece, width in zip(others, pieces[1:]):
        codes.bitwise_or_(_unpack_planes(piece, width) << shift)
        shift += width
    return codes


def _pack_planes(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes
    planes = codes.chunk(8 // width, dim=1)
    packed = planes[0].clone()
    for i, plane in enumerate(planes[1:], start=1):
        packed |= plane << (width * i)
    return packed


def _unpack_planes(packed: Tensor, width: int) -> Tensor:
    if width == 8:
        return packed
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    return (packed.unsqueeze(1) >> shifts).bitwise_and_(2**width - 1).flatten(1)
