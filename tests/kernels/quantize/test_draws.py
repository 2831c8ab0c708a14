"""The draws of stochastic rounding: as even as random ones, and others for every key, group and value."""

import pytest
import torch

from ds_compress.kernels.quantize.grid import draws

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


def test_four_values_at_the_corners_of_two_rows_are_independent():
    """Words are sums of what is of a lane and products with what is of a row: without the products, two
    differences would cancel."""
    x = uniform(3).view(-1, 64)[: COUNT // 128 * 2].view(-1, 2, 64)
    for lane, other in ((0, 1), (0, 4), (5, 62)):
        corners = x[:, 0, lane] * x[:, 1, lane] * x[:, 0, other] * x[:, 1, other]
        assert abs(corners.mean()) < 6 / len(corners) ** 0.5


def test_lower_bits_are_independent_of_upper_ones():
    upper, lower = draws((1 << 16, 64), 3, CPU)
    x = upper - 127.5
    for place in range(64):
        assert abs((x[:, place] * (lower[:, 0] - 127.5)).mean()) < 6 * (65536 - 1) / 12 / 2**8


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
