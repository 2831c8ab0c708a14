"""The compiled kernels of the CPU against their specification, bit for bit."""

import logging
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress import config  # noqa: F401  (registers the codecs)
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels import cpu, reference, resolve

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

ROWS = cpu.COMPILED_NUMEL // 32  # enough for the smallest group size


def values(n, size, dtype, seed, special=None):
    """Groups of very different magnitudes; some constant, some zero, and, if given, some holding `special`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=generator) * torch.exp2(torch.randn(n, 1, generator=generator) * 20)
    x[::7] = x[::7, :1]
    x[::11] = 0
    x[::13] *= 1e-30
    if special is not None:
        x[::17, seed % size] = special
    return x.to(dtype)


def assert_equal(ours, theirs):
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        assert torch.equal(mine.nan_to_num(nan=1.5e30) if mine.is_floating_point() else mine,
                           its.nan_to_num(nan=1.5e30) if its.is_floating_point() else its)


@pytest.mark.parametrize("bits, size, symmetric, dtype, hadamard", [
    (8, 128, False, torch.float32, False),
    (4, 128, True, torch.bfloat16, False),
    (2, 32, False, torch.bfloat16, True),
])
@settings(max_examples=15, deadline=None, database=None)
@given(
    n=st.integers(ROWS, 3 * ROWS),
    special=st.sampled_from([None, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference(bits, size, symmetric, dtype, hadamard, n, special, seed):
    x = values(n, size, dtype, seed, special)
    parts = cpu.quantize(x, bits, symmetric, torch.bfloat16, hadamard)
    assert_equal(parts, reference.quantize(x, bits, symmetric, torch.bfloat16, hadamard))
    parts = (*parts, None) if symmetric else parts
    decoded = cpu.dequantize(*parts, bits, hadamard, dtype)
    assert_equal([decoded], [reference.dequantize(*parts, bits, hadamard, dtype)])
    assert not cpu.Kernel.failed


@pytest.mark.parametrize("bits, size, symmetric, scale_dtype, dtype, hadamard", [
    (1, 64, False, torch.float32, torch.float32, False),
    (1, 64, True, torch.bfloat16, torch.float32, False),  # not compiled: a mean
    (7, 64, True, torch.float32, torch.float16, False),
    (4, 24, False, torch.bfloat16, torch.bfloat16, False),  # not compiled: no whole vectors
    (8, 1 << 16, False, torch.bfloat16, torch.float32, False),  # "tensor" of any length must not be compiled
    (5, 128, False, torch.bfloat16, torch.float64, False),
])
def test_other_settings_equal_the_reference(bits, size, symmetric, scale_dtype, dtype, hadamard):
    x = values(2 * cpu.COMPILED_NUMEL // size + 1, size, dtype, 3)
    parts = cpu.quantize(x, bits, symmetric, scale_dtype, hadamard)
    assert_equal(parts, reference.quantize(x, bits, symmetric, scale_dtype, hadamard))
    parts = (*parts, None) if symmetric else parts
    wide = torch.float32 if dtype == torch.float16 else dtype
    assert_equal([cpu.dequantize(*parts, bits, hadamard, wide)], [reference.dequantize(*parts, bits, hadamard, wide)])
    assert not cpu.Kernel.failed


def test_a_new_shape_or_mode_costs_no_compilation():
    codec = build({"name": "quantize", "bits": 4})

    def roundtrip(*shape):
        x = torch.randn(shape)
        return codec.decode(codec.encode(x, Context()), TensorSpec.of(x), Context())

    roundtrip(4, 256, 256)
    with torch.compiler.set_stance("fail_on_recompile"):
        roundtrip(1, 333, 1000)
        roundtrip(7, 1024, 64)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            roundtrip(70000)
        x = torch.randn(300, 300, requires_grad=True)
        codec.encode(x, Context())


@pytest.mark.slow
def test_more_settings_than_a_compiler_keeps_by_default():
    x = values(ROWS, 32, torch.float32, 0)
    for bits in range(1, 9):
        for scale_dtype in (torch.bfloat16, torch.float32):
            parts = cpu.quantize(x, bits, False, scale_dtype)
            assert_equal(parts, reference.quantize(x, bits, False, scale_dtype))
    assert not cpu.Kernel.failed


def test_without_a_compiler_the_reference_runs_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu.Kernel, "failed", False)
    kernel = cpu.Kernel(lambda x: torch._dynamo.graph_break(), lambda x: x.zero_())
    other = cpu.Kernel(lambda x: x.fill_(2), lambda x: x.fill_(1))
    x = torch.ones(8)
    with caplog.at_level(logging.WARNING):
        kernel(x)
        assert x.sum() == 0
        other(x)
        assert x.sum() == 8
    assert len(caplog.records) == 1 and "uncompiled" in caplog.text


def test_uncompiled_blocks_equal_the_reference(monkeypatch):
    monkeypatch.setattr(cpu.Kernel, "failed", True)
    x = values(3 * ROWS, 128, torch.bfloat16, 5)
    for hadamard in (False, True):
        parts = cpu.quantize(x, 4, False, torch.bfloat16, hadamard)
        assert_equal(parts, reference.quantize(x, 4, False, torch.bfloat16, hadamard))
        for dtype in (torch.bfloat16, torch.float32):
            decoded = cpu.dequantize(*parts, 4, hadamard, dtype)
            assert_equal([decoded], [reference.dequantize(*parts, 4, hadamard, dtype)])


def test_a_test_can_override():
    with resolve.using(reference):
        assert resolve.kernels(torch.device("cpu")) is reference
    assert resolve.kernels(torch.device("cpu")) is cpu
