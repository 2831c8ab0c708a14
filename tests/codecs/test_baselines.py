"""Codecs minmax and fp8 against the formulas of their papers; lossless: every bit, never larger."""

import resource

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.testing import relative_error
from tests.support.codecs import error_of, roundtrip
from tests.support.messages import residual_stream


@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_matches_the_formula(bits):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    wide, top = x.double(), 2**bits - 1
    lo, hi = wide.min(), wide.max()
    expected = lo + (hi - lo) * torch.round(top * (wide - lo) / (hi - lo)) / top
    decoded = roundtrip({"name": "minmax", "bits": bits}, x).double()
    assert torch.allclose(decoded, expected, atol=1e-6, rtol=0)
    constant = torch.full((3, 5), 0.1)
    assert torch.equal(roundtrip({"name": "minmax", "bits": bits}, constant), constant)


def test_minmax_golden_ties_go_to_even():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0, 0.4, 1.6, 3.0])
    codes, bounds = build({"name": "minmax", "bits": 2}).encode(x, Context())
    # codes 0 0 2 2 | 3 0 2 3, in four planes of two
    assert codes.tolist() == [[0 | 2 << 2 | 3 << 4 | 2 << 6, 0 | 2 << 2 | 0 << 4 | 3 << 6]]
    assert bounds.tolist() == [[0, 3]]
    assert roundtrip({"name": "minmax", "bits": 2}, x).tolist() == [0, 0, 2, 2, 3, 0, 2, 3]


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
    in_groups, whole = (roundtrip({"name": "fp8", "group_size": size}, x) for size in (128, "tensor"))
    assert relative_error(x[:512], in_groups[:512]) < 0.04 < 0.5 < relative_error(x[:512], whole[:512])


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=2000), repeat=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_any_bits_survive(data, repeat, dtype):
    """Any bytes as numbers: nan with any payload, -0.0, denormals; compressible when repeated."""
    data = data * repeat
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    x = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    assert torch.equal(roundtrip("lossless", x).view(torch.uint8), x.view(torch.uint8))
    codec = build("lossless")
    length, _ = codec.encode(x, Context())
    assert length <= codec.planned_extra_payload(TensorSpec.of(x))[0][0][0] == x.nbytes


@pytest.mark.parametrize(
    "dtype, ratio",
    [(torch.bfloat16, 1.47), (torch.float16, 1.17), (torch.float32, 1.19), (torch.float64, 1.12)],
)
def test_ratio_of_gaussian_numbers(dtype, ratio):
    """The exponent of a Gaussian number holds 2.6 bits: 16 / 10.6 = 1.51 is the limit for bf16."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    length, body = build("lossless").encode(x, Context())
    assert x.nbytes / (length.nbytes + body.nbytes) > ratio


def test_wire_of_an_incompressible_tensor():
    x = torch.tensor([0x0102, 0x0304, -2], dtype=torch.int16).view(torch.bfloat16)
    length, body = build("lossless").encode(x, Context())
    assert length.item() == 6 and bytes(body.tolist()) == b"\x02\x04\xfe" + b"\x01\x03\xff"


@pytest.mark.parametrize("length", [-1, 4001, 2**62])
def test_a_length_that_cannot_be_is_refused(length):
    with pytest.raises(CompressionError, match=f"a frame of {length} bytes came for a tensor of 4000 bytes"):
        build("lossless").extra_payload((torch.tensor([length]),), TensorSpec((1000,), torch.float32))


def test_a_frame_that_swells_is_refused():
    """The library believes a frame, not the limit it is given: 40 kB of packet became 1 GiB of memory."""
    spec = TensorSpec((50_000,), torch.float32)
    stream = zstandard.ZstdCompressor().compressobj(size=2**30)
    frame = b"".join(stream.compress(bytes(2**20)) for _ in range(2**10)) + stream.flush()
    assert len(frame) < spec.nbytes
    parts = torch.tensor([len(frame)]), torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"a zstd frame of {2**30} bytes came, expected 200000"):
        build("lossless").decode(parts, spec, Context())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
