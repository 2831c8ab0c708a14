"""8-bit floats in C++, on every processor, against plain torch: bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for
from tests.support.messages import values

FORMATS = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
SIZES = st.sampled_from([1, 7, 8, 15, 16, 24, 31, 32, 63, 64, 65, 128, 200, 1031])


@EACH_TARGET
@settings(max_examples=100, deadline=None, database=None)
@given(
    format=FORMATS,
    size=SIZES,
    n=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    special=st.sampled_from([None, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 1000),
)
@pytest.mark.extended(keep=1)
def test_codes_are_those_of_torch(target, format, size, n, dtype, special, seed):
    x = values(n, size, dtype, seed, special)
    with compiled_for(target):
        assert_same_bits(cpu.encode_fp8(x, format), reference.encode_fp8(x, format))


@EACH_TARGET
@settings(max_examples=100, deadline=None, database=None)
@given(format=FORMATS, size=SIZES, n=st.integers(1, 40), seed=st.integers(0, 1000), wild=st.booleans())
def test_any_bytes_decode_to_what_torch_makes_of_them(target, format, size, n, seed, wild):
    """Codes that no encoder writes too: nan, the infinities of e5m2, and scales that are any float."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, size), dtype=torch.uint8, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    scales = bits.view(torch.float32) if wild else torch.rand(n, generator=generator)
    for out in (torch.float32, torch.bfloat16):
        with compiled_for(target):
            decoded = cpu.decode_fp8(codes, scales, format, out)
        assert_same_bits([decoded], [reference.decode_fp8(codes, scales, format, out)])


@EACH_TARGET
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_16_bit_float(target, format):
    """All exponents, subnormals, ties and both zeros."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    groups = x[x.isfinite()].view(2, -1)
    for x in (groups, groups.float(), groups * 1e-30, groups.clamp(-448, 448), 0 * groups):
        expected = reference.encode_fp8(x, format)
        with compiled_for(target):
            assert_same_bits(cpu.encode_fp8(x, format), expected)
            decoded = cpu.decode_fp8(*expected, format, x.dtype)
        assert_same_bits([decoded], [reference.decode_fp8(*expected, format, x.dtype)])


@EACH_TARGET
def test_messages_beyond_the_caches_have_the_same_bits(target):
    """What they decode to goes past the caches, if it is aligned."""
    x = values(66_000, 64, torch.float32, 0)
    codes, scales = reference.encode_fp8(x, torch.float8_e4m3fn)
    with compiled_for(target):
        ours = cpu.decode_fp8(codes, scales, torch.float8_e4m3fn, torch.float32)
    assert_same_bits([ours], [reference.decode_fp8(codes, scales, torch.float8_e4m3fn, torch.float32)])
