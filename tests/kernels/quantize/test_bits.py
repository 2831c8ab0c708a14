"""kernels.bits: the layout drawn in its docstring, and that nothing is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.quantize.bits import pack, packed_size, unpack


def planar(codes, width):
    """The drawn layout, one code at a time."""
    planes = 8 // width
    run = len(codes) // planes
    return [sum(codes[i * run + j] << (width * i) for i in range(planes)) for j in range(run)]


def drawn(codes, bits):
    """Split `bits` into powers of two, largest first; the codes' bits are taken from below."""
    packed, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            packed += planar([(c >> shift) & (2**width - 1) for c in codes], width)
            shift += width
    return packed


@pytest.mark.parametrize(
    "bits, packed",
    [
        (1, [0b11010110]),
        (2, [0b10_01_11_00, 0b11_00_01_10]),
        (4, [0x50, 0x61, 0x72, 0x83]),
        (3, [0b01_11_00_10, 0b00_11_10_01, 0b10110001]),
        (8, [0, 1, 2, 3, 5, 6, 7, 8]),
    ],
)
def test_golden(bits, packed):
    codes = {
        1: [0, 1, 1, 0, 1, 0, 1, 1],
        2: [0, 2, 3, 1, 1, 0, 2, 3],
        4: [0, 1, 2, 3, 5, 6, 7, 8],
        3: [6, 1, 0, 2, 7, 7, 1, 4],
        8: [0, 1, 2, 3, 5, 6, 7, 8],
    }[bits]
    assert pack(torch.tensor([codes], dtype=torch.uint8), bits).tolist() == [packed]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 20), st.randoms(use_true_random=False))
def test_packs_as_drawn_and_loses_nothing(bits, groups, eighths, random):
    rows = [[random.randrange(2**bits) for _ in range(8 * eighths)] for _ in range(groups)]
    codes = torch.tensor(rows, dtype=torch.uint8).view(groups, 8 * eighths)
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (groups, packed_size(8 * eighths, bits))
    assert packed.tolist() == [drawn(row, bits) for row in rows]
    assert torch.equal(unpack(packed, bits), before) and torch.equal(codes, before)
