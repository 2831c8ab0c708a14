"""Codec fp8: precision, scale, saturation."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels import native
from ds_compress.kernels.fp8 import cpu as float8
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("largest", ["finite", "inf", "nan"])
def test_compiled_passes_equal_torch_on_every_16_bit_float(dtype, format, largest, monkeypatch):
    """All exponents, subnormals, ties and both zeros; a few random low bits behind them in fp32."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:
        low = torch.randint(
            0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32
        )
        x = torch.cat([x, (x.view(torch.int32) | low).view(torch.float32)])
    groups = x[x.isfinite()].view(2, -1)  # a group of positive and one of negative floats, roughly
    if largest != "finite":
        groups[1, 5] = float(largest)
    codec = build({"name": "fp8", "format": "e4m3" if format == torch.float8_e4m3fn else "e5m2"})
    for values in (groups, groups * 0, groups * 1e-30, groups.clamp(-448, 448), groups.clamp(-57344, 57344)):
        for shape in ((1, -1), (2, -1)):
            values = values.reshape(shape)
            codes, scale = float8.encode_fp8(values, format)
            wide = values.float()
            finfo = torch.finfo(format)
            reach = wide.abs().amax(1)
            reach[reach.isfinite()] = reach[reach.isfinite()].clamp(max=2.0**127)  # no product overflows
            expected_scale = reach / finfo.max
            scaled = wide / torch.where(expected_scale != 0, expected_scale, 1)[:, None]
            expected = scaled.clamp_(finfo.min, finfo.max).to(format)
            torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
            keep = scaled.isfinite()
            assert torch.equal(codes[keep], expected.view(torch.uint8)[keep])
            assert codes.view(format)[~keep].float().isnan().all()
            decoded = float8.decode_fp8(codes, scale, format, dtype)
            reference = (expected.float() * expected_scale[:, None]).to(dtype)
            torch.testing.assert_close(decoded, reference, rtol=0, atol=0, equal_nan=True)
    decoded = []
    for least in (0, 1 << 60):  # compiled, plain torch
        monkeypatch.setattr(native, "LONG", least)
        decoded.append(codec.decode(codec.encode(groups, Context()), TensorSpec.of(groups), Context()))
    torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)
