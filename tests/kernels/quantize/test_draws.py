"""The draws of stochastic rounding: as even as random ones, and others for every key, group and value."""

import pytest
import torch

from ds_compress.kernels.quantize.grid import draws

CPU = torch.device("cpu")
SHAPE = (4096, 256)
COUNT = SHAPE[0] * SHAPE[1]


def uniform(key, shape=SHAPE):
    """In units of a uniform distribution's standard deviation, around its mean."""
    return ((draws(shape, key, CPU).double() + 0.5) / 65536 - 0.5).flatten() * 12**0.5


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
def test_they_are_even(key):
    for bits in (draws(SHAPE, key, CPU) >> 8, draws(SHAPE, key, CPU) & 255):
        counts = bits.flatten().bincount(minlength=256).double()
        # chi-squared with 255 degrees of freedom: 6 standard deviations above its mean
        assert ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum() < 255 + 6 * 510**0.5
    x = uniform(key)
    for distance in (1, 8, 31, 32, 33, 128, 256):  # neighbours, halves of a word, neighbouring groups
        assert abs((x[distance:] * x[:-distance]).mean()) < 6 / COUNT**0.5


@pytest.mark.parametrize("other", [4, 7, 5 + 32, 5 + 2**31, 5 + 2**32, 5 + 2**63, 5 + 64 * 32])
def test_other_keys_draw_others(other):
    """A first version mixed half of the key in late: keys that differed in one bit there drew much alike."""
    x, y = uniform(5), uniform(other)
    assert abs((x * y).mean()) < 6 / COUNT**0.5


def test_no_value_takes_the_draw_of_another_one():
    """Words are of 32 bits: of few enough draws hardly two adjoin to the same pair."""
    for size in (8, 24, 32, 40, 64, 72):
        x = draws((64, size), 9, CPU)
        pairs = x[:, 1:].long() << 16 | x[:, :-1]
        assert pairs.unique().numel() > 0.999 * pairs.numel()
