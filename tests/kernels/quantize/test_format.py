"""Packed codes lie as the docstring draws them; draws of stochastic rounding are even and differ."""

import hashlib

import pytest
import torch

from ds_compress.kernels.quantize import reference
from ds_compress.kernels.quantize.bits import pack
from ds_compress.kernels.quantize.grid import Grid, draws


def test_packed_codes_lie_as_drawn():
    """The digest is of what the drawing of the docstring says, one code at a time."""
    codes = torch.arange(960).mul(37).view(4, 240)
    packed = [pack(codes.remainder(2**bits).to(torch.uint8), bits) for bits in range(1, 9)]
    found = hashlib.blake2b(b"".join(part.numpy().tobytes() for part in packed), digest_size=8)
    assert found.hexdigest() == "f551b16c9fe10ac4"


CPU = torch.device("cpu")
SHAPE = (4096, 256)
COUNT = SHAPE[0] * SHAPE[1]


def uniform(key, shape=SHAPE):
    """In units of a uniform distribution's standard deviation, around its mean."""
    upper, lower = draws(shape, key, CPU)
    return ((upper * 256 + lower).double().add(0.5) / 65536 - 0.5).flatten() * 12**0.5


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
def test_they_are_even(key):
    upper, lower = draws(SHAPE, key, CPU)
    for bits in (upper, lower, *(upper[:, place] for place in (0, 1, 3, 63, 255))):  # also in lanes of rows
        expected = bits.numel() / 256
        counts = bits.flatten().bincount(minlength=256).double()
        # chi-squared with 255 degrees of freedom: 6 standard deviations above its mean
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 510**0.5
    x = uniform(key)
    for distance in (1, 3, 4, 8, 63, 64, 65, 128, 256):  # neighbours, words, rows, groups
        assert abs((x[distance:] * x[:-distance]).mean()) < 6 / COUNT**0.5


def test_columns_do_not_go_together_under_one_key():
    """The low bytes of a product depend on the low bits of its factors alone: some pairs of columns had a
    correlation of up to 0.98 over all rows of a message."""
    for key in range(8):
        upper, _ = draws((8192, 64), key, CPU)
        correlations = torch.corrcoef(upper.T.double()).fill_diagonal_(0.0)
        assert correlations.abs().max() < 6 / 8192**0.5


@pytest.mark.parametrize("other", [4, 7, 5 + 32, 5 + 2**31, 5 + 2**32, 5 + 2**63, 5 + 64 * 32])
def test_other_keys_draw_others(other):
    """A first version mixed half of the key in late: keys that differed in one bit there drew much alike."""
    x, y = uniform(5), uniform(other)
    assert abs((x * y).mean()) < 6 / COUNT**0.5


def test_no_value_takes_the_draw_of_another_one():
    """Of few enough draws hardly any four in a row are the same."""
    for size in (8, 24, 32, 40, 64, 72):
        x, _ = draws((64, size), 9, CPU)
        fours = x.unfold(1, 4, 1).long() @ torch.tensor([1 << 24, 1 << 16, 1 << 8, 1])
        assert fours.unique().numel() > 0.999 * fours.numel()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_dithers_alike_whatever_the_default_dtype_is(default):
    """Draws were halved in the default dtype: in bfloat16 other codes came than from C++ or Triton."""
    groups, grid, key = torch.randn(64, 128, dtype=torch.float32), Grid(4), 2**64 - 7
    parts = reference.quantize(groups, grid, key)
    expected = *parts, reference.dequantize(parts, grid, dither=key)
    torch.set_default_dtype(default)
    try:
        parts = reference.quantize(groups, grid, key)
        found = *parts, reference.dequantize(parts, grid, dither=key)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))
