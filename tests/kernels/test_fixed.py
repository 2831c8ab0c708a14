"""The codes of acsgd and minmax in C++, on every processor, against plain torch: bit for bit."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels import cpu, reference
from tests.support.native import TARGETS, compiled_for, runs_here
from tests.support.same_bits import assert_same_bits, values

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SPECIAL = [None, float("inf"), -float("inf"), float("nan"), torch.finfo(torch.float32).max]


@pytest.mark.parametrize("target", filter(runs_here, TARGETS))
@settings(max_examples=100, deadline=None, database=None)
@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 300) | st.sampled_from([512, 1024, 1032]),
    channels=st.integers(1, 40) | st.sampled_from([64, 130, 1100]),
    dtype=st.sampled_from(DTYPES),
    special=st.sampled_from(SPECIAL),
    seed=st.integers(0, 1000),
)
def test_channels(target, bits, rows, channels, dtype, special, seed):
    x = values(channels, rows, torch.float32, seed, special).t().to(dtype)
    size = -(-rows // 8) * 8
    expected = reference.encode_channels(x, bits, size)
    noise = torch.randint(0, 256, expected[0].shape, dtype=torch.uint8)
    with compiled_for(target):
        assert_same_bits(cpu.encode_channels(x, bits, size), expected)
        for packed in (expected[0], noise):
            decoded = cpu.decode_channels(packed, expected[1], bits, rows, dtype)
            assert_same_bits([decoded], [reference.decode_channels(packed, expected[1], bits, rows, dtype)])


@pytest.mark.parametrize("target", filter(runs_here, TARGETS))
@settings(max_examples=100, deadline=None, database=None)
@given(
    bits=st.integers(1, 8),
    n=st.integers(1, 400),
    scale=st.integers(-38, 38),
    dtype=st.sampled_from(DTYPES),
    special=st.sampled_from(SPECIAL),
    seed=st.integers(0, 1000),
)
def test_a_range(target, bits, n, scale, dtype, special, seed):
    x = torch.randn(1, 8 * n, generator=torch.Generator().manual_seed(seed)) * 10.0**scale
    x = x.abs() if seed % 2 else x
    for place, value in enumerate((-0.0, 0.0, special)):
        if value is not None:
            x[0, (seed + 3 * place) % (8 * n)] = value
    x = x.to(dtype)
    expected = reference.encode_range(x, bits)
    with compiled_for(target):
        assert_same_bits(cpu.encode_range(x, bits), expected)
        for out in (torch.float32, torch.bfloat16):
            decoded = cpu.decode_range(*expected, bits, out)
            assert_same_bits([decoded], [reference.decode_range(*expected, bits, out)])
