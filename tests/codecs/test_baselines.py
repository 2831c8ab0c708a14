"""Codecs minmax and acsgd against the formulas of their papers in float64."""

import pytest
import torch

from ds_compress.codec import Context, build
from tests.support.codecs import roundtrip


@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_matches_the_formula(bits):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    wide, top = x.double(), 2**bits - 1
    lo, hi = wide.min(), wide.max()
    expected = lo + (hi - lo) * torch.round(top * (wide - lo) / (hi - lo)) / top
    assert torch.allclose(
        roundtrip({"name": "minmax", "bits": bits}, x).double(), expected, atol=1e-6, rtol=0
    )


def test_minmax_golden_ties_go_to_even():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0, 0.4, 1.6, 3.0])
    codec = build({"name": "minmax", "bits": 2})
    codes, bounds = codec.encode(x, Context())
    # codes 0 0 2 2 | 3 0 2 3, in four planes of two
    assert codes.tolist() == [[0 | 2 << 2 | 3 << 4 | 2 << 6, 0 | 2 << 2 | 0 << 4 | 3 << 6]]
    assert bounds.tolist() == [[0, 3]]
    assert roundtrip({"name": "minmax", "bits": 2}, x).tolist() == [0, 0, 2, 2, 3, 0, 2, 3]


def test_minmax_zero_is_off_the_grid_of_signed_values():
    x = torch.tensor([-1.0, 0, 1, 1])
    assert torch.allclose(roundtrip({"name": "minmax", "bits": 2}, x), torch.tensor([-1, 1 / 3, 1, 1]))


def test_minmax_constants_stay():
    x = torch.full((3, 5), 0.1)
    assert torch.equal(roundtrip("minmax", x), x)


@pytest.mark.parametrize("bits", range(1, 9))
def test_acsgd_matches_the_formula(bits):
    x = torch.randn(3, 7, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 10)
    wide, half = x.double(), 2.0 ** (bits - 1)
    s = wide.abs().amax((0, 1))
    expected = torch.round(wide / (s * (1 + 1e-6)) * half).clamp(-half, half - 1) / half * s
    error = (roundtrip({"name": "acsgd", "bits": bits}, x).double() - expected).abs()
    assert (error <= 1e-6 * s).all()


def test_acsgd_golden_two_bits_halve_the_largest():
    x = torch.tensor([[4.0, 0], [-4, 0], [1.9, 0], [0, 0]])
    assert roundtrip({"name": "acsgd", "bits": 2}, x).tolist() == [[2, 0], [-4, 0], [2, 0], [0, 0]]


def test_acsgd_golden_epsilon_keeps_ties_from_rounding_up():
    x = torch.tensor([[-4.0], [1.5], [-1.5], [2.5]])
    assert roundtrip({"name": "acsgd", "bits": 3}, x).view(-1).tolist() == [-4, 1, -1, 2]


def test_acsgd_small_gradients_survive():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    choice = {"name": "acsgd", "bits": 8}
    assert torch.equal(roundtrip(choice, x * 2**-90), roundtrip(choice, x) * 2**-90)
