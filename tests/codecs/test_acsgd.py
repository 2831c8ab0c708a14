"""Codec acsgd against AC-SGD's formula in float64."""

import pytest
import torch

from tests.support.measure import roundtrip


@pytest.mark.parametrize("bits", range(1, 9))
def test_matches_the_formula(bits):
    x = torch.randn(3, 7, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 10)
    wide, half = x.double(), 2.0 ** (bits - 1)
    s = wide.abs().amax((0, 1))
    expected = torch.round(wide / (s * (1 + 1e-6)) * half).clamp(-half, half - 1) / half * s
    error = (roundtrip({"name": "acsgd", "bits": bits}, x).double() - expected).abs()
    assert (error <= 1e-6 * s).all()


def test_golden_two_bits_halve_the_largest():
    x = torch.tensor([[4.0, 0], [-4, 0], [1.9, 0], [0, 0]])
    assert roundtrip({"name": "acsgd", "bits": 2}, x).tolist() == [[2, 0], [-4, 0], [2, 0], [0, 0]]


def test_golden_epsilon_keeps_ties_from_rounding_up():
    x = torch.tensor([[-4.0], [1.5], [-1.5], [2.5]])
    assert roundtrip({"name": "acsgd", "bits": 3}, x).view(-1).tolist() == [-4, 1, -1, 2]


def test_small_gradients_survive():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    choice = {"name": "acsgd", "bits": 8}
    assert torch.equal(roundtrip(choice, x * 2**-90), roundtrip(choice, x) * 2**-90)
