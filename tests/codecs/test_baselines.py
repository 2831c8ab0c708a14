"""Codecs minmax, acsgd and fp8 against the formulas of their papers, and their formats."""

import pytest
import torch

from ds_compress.codec import Context, build
from tests.support.codecs import error_of, roundtrip
from tests.support.messages import residual_stream


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


@pytest.mark.parametrize("format, digits, normal_range", [("e4m3", 4, 2.0**-14), ("e5m2", 3, 2.0**-29)])
@pytest.mark.parametrize("group_size", ["tensor", 16])
def test_fp8_precision(format, digits, normal_range, group_size):
    magnitude = torch.logspace(-12, 12, 160, base=2)
    x = magnitude * torch.randn(160, generator=torch.Generator().manual_seed(0))
    error = (roundtrip({"name": "fp8", "format": format, "group_size": group_size}, x) - x).abs()
    unit = x.abs().maximum(x.abs().max() * normal_range)  # below it steps are absolute
    assert (error <= unit * 2.0**-digits * (1 + 1e-5)).all()
    assert error.max() > 0


def test_fp8_golden():
    x = torch.tensor([448.0, -448, 1, 1.0625, 1.1875, 0, 2**-9, 17])
    codes, scale = build("fp8").encode(x, Context())
    assert scale.tolist() == [1]
    # sign, 4 of exponent (bias 7), 3 of mantissa; ties go to the even mantissa
    assert codes.tolist() == [[0x7E, 0xFE, 0x38, 0x38, 0x3A, 0x00, 0x01, 0x58]]
    assert roundtrip("fp8", x).tolist() == [448, -448, 1, 1, 1.25, 0, 2**-9, 16]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_the_largest_value_of_any_scale_stays_finite(format):
    for exponent in range(-149, 128):
        x = torch.tensor([1.9999999, 1.3, -1.9999999]) * 2.0**exponent
        assert roundtrip({"name": "fp8", "format": format}, x).isfinite().all(), exponent


def test_fp8_groups_help_where_a_tensor_scale_underflows():
    x = residual_stream()[0]
    x[:512] *= 1e-6
    assert error_of({"name": "fp8"}, x[:512]) < 0.04
    small = lambda choice: (roundtrip(choice, x)[:512] - x[:512]).norm() / x[:512].norm()  # noqa: E731
    assert small({"name": "fp8", "group_size": 128}) < 0.04 < 0.5 < small({"name": "fp8"})
