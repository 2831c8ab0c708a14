"""Codec fp8: precision, scale, saturation."""

import pytest
import torch

from ds_compress.codec import Context, build
from tests.support.codecs import error_of, roundtrip
from tests.support.messages import residual_stream


@pytest.mark.parametrize("format, digits, normal_range", [("e4m3", 4, 2.0**-14), ("e5m2", 3, 2.0**-29)])
@pytest.mark.parametrize("group_size", ["tensor", 16])
def test_precision(format, digits, normal_range, group_size):
    magnitude = torch.logspace(-12, 12, 160, base=2)
    x = magnitude * torch.randn(160, generator=torch.Generator().manual_seed(0))
    error = (roundtrip({"name": "fp8", "format": format, "group_size": group_size}, x) - x).abs()
    unit = x.abs().maximum(x.abs().max() * normal_range)  # below it steps are absolute
    assert (error <= unit * 2.0**-digits * (1 + 1e-5)).all()
    assert error.max() > 0


def test_golden():
    x = torch.tensor([448.0, -448, 1, 1.0625, 1.1875, 0, 2**-9, 17])
    codes, scale = build("fp8").encode(x, Context())
    assert scale.tolist() == [1]
    # sign, 4 of exponent (bias 7), 3 of mantissa; ties go to the even mantissa
    assert codes.tolist() == [[0x7E, 0xFE, 0x38, 0x38, 0x3A, 0x00, 0x01, 0x58]]
    assert roundtrip("fp8", x).tolist() == [448, -448, 1, 1, 1.25, 0, 2**-9, 16]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_the_largest_value_of_any_scale_stays_finite(format):
    for exponent in range(-149, 128):
        x = torch.tensor([1.9999999, 1.3, -1.9999999]) * 2.0**exponent
        assert roundtrip({"name": "fp8", "format": format}, x).isfinite().all(), exponent


def test_groups_help_where_a_tensor_scale_underflows():
    x = residual_stream()[0]
    x[:512] *= 1e-6
    assert error_of({"name": "fp8"}, x[:512]) < 0.04
    small = lambda choice: (roundtrip(choice, x)[:512] - x[:512]).norm() / x[:512].norm()  # noqa: E731
    assert small({"name": "fp8", "group_size": 128}) < 0.04 < 0.5 < small({"name": "fp8"})
