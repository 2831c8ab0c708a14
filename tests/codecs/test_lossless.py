"""lossless: every bit, never larger."""

import resource

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_compress.codecs  # noqa: F401  (registers)
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def round_trip(x):
    codec = build("lossless")
    spec = TensorSpec.of(x)
    parts = codec.encode(x, Context())
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == codec.layout(
        spec
    ) + codec.extra_payload(parts[:1], spec)
    assert parts[1].numel() <= codec.planned_extra_payload(spec)[0][0][0] == x.nbytes
    out = codec.decode(parts, spec, Context())
    assert TensorSpec.of(out) == spec
    return out


def bits(x):
    return x.contiguous().view(BITS[x.element_size()])


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=2000), repeat=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_any_bits_survive(data, repeat, dtype):
    """Any bytes as numbers: nan with any payload, -0.0, denormals; compressible when repeated."""
    data = data * repeat
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    x = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    assert torch.equal(bits(round_trip(x)), bits(x))


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_every_pattern_of_a_16_bit_number(dtype):
    pattern = torch.arange(-(2**15), 2**15).to(BITS[dtype.itemsize]) << (8 * dtype.itemsize - 16)
    x = pattern.view(dtype)
    assert x.isnan().any() and x.isinf().any() and (bits(x) == bits(torch.tensor([-0.0], dtype=dtype))).any()
    assert torch.equal(bits(round_trip(x)), pattern)


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
