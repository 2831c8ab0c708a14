"""The Triton kernels of quantization against the reference; tests/kernels/test_triton.py runs this file."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from ds_compress.kernels.quantize import triton as groups_in_triton
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import any_grid, assert_same_bits
from tests.support.kernels import stored
from tests.support.messages import values
from tests.support.triton import DEVICE, DTYPES, EXAMPLES, INTERPRETED, SPECIAL, fused, launched, need_device

need_device()


def dequantize(*arguments):
    """`fused.dequantize`, whose tensors are moved one by one: parts, grid, dtype."""
    parts = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return fused.dequantize(parts, *arguments[len(parts) :])


def assert_rounded(ours, exact):
    """`ours` is `exact`, in fp32, rounded to its own dtype; the interpreter truncates to bfloat16."""
    if INTERPRETED and ours.dtype == torch.bfloat16:
        torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", range(1, 9))
@given(
    size=st.sampled_from([8, 24, 32, 128, 136, 512]),
    hadamard=st.booleans(),
    n=st.integers(0, 40),
    rounding=st.sampled_from(["nearest", "stochastic", "dither"]),
    dtype=DTYPES,
    out=DTYPES,
    scale=st.integers(-30, 30),
)
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_quantize_equals_the_reference(bits, size, hadamard, n, rounding, dtype, out, scale):
    if dtype == torch.float16:
        scale //= 10
    groups = (torch.randn(n, size) * 10.0**scale + 10.0**scale).to(dtype)
    if n > 3:
        groups[1], groups[2] = 0, groups[2, 0]
        groups[1, n % size] = -0.0
    grid = any_grid(bits, hadamard, size, n)
    dither = None if rounding == "nearest" else (n * 0x9E3779B97F4A7C15 + size) % 2**64
    expected = reference.quantize(groups, grid, dither)
    parts = launched(fused.quantize, groups, grid, dither)
    assert_same_bits(parts, expected)
    subtracted = dither if rounding == "dither" else None
    decoded = launched(dequantize, *expected, grid, out, None, subtracted)
    assert decoded.dtype == out
    assert_rounded(decoded, reference.dequantize(expected, grid, dither=subtracted))


# the interpreter cuts off instead of rounding to bfloat16
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_messages_that_follow_a_state_equal_the_reference(dtype, scale):
    grid = Grid(4, hadamard=True)
    generator = torch.Generator().manual_seed(1)
    groups, state = (torch.randn(20, 128, generator=generator).to(dtype) for _ in range(2))
    for kept in (stored(state.float(), store) for store in ("fp32", "bf16", "int8")):
        expected, its_new = reference.quantize_with_residual(groups, kept, scale, 0.75, 0.25, grid, 128)
        out = tuple(torch.empty_like(part, device=DEVICE) for part in expected)
        parts, new = fused.quantize_with_residual(
            groups.to(DEVICE), tuple(part.to(DEVICE) for part in kept), scale, 0.75, 0.25, grid, 128, out
        )
        assert all(part is place for part, place in zip(parts, out, strict=True))
        assert_same_bits(map(torch.Tensor.cpu, (*parts, *new)), (*expected, *its_new))
    state = state.float()
    parts, new = fused.quantize_change(groups.to(DEVICE), state.to(DEVICE), scale, grid, 128)
    expected = reference.quantize_change(groups, state, scale, grid, 128)
    assert_same_bits(map(torch.Tensor.cpu, (*parts, new)), (*expected[0], expected[1]))
    back = fused.dequantize_change(parts, state.to(DEVICE), scale, grid, dtype)
    expected = reference.dequantize_change(expected[0], state, scale, grid, dtype)
    assert_same_bits(map(torch.Tensor.cpu, back), expected)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 7])
def test_non_finite_groups_decode_to_non_finite(bits, hadamard, special):
    groups = torch.randn(4, 32)
    groups[2, 5] = special
    grid = Grid(bits, hadamard)
    decoded = launched(dequantize, *launched(fused.quantize, groups, grid), grid)
    assert not decoded[2].isfinite().any() or (special == torch.inf and not decoded[2].isfinite().all())
    assert decoded[[0, 1, 3]].isfinite().all()


def test_groups_that_are_not_contiguous_or_too_large():
    groups = torch.randn(64, 10).t()
    assert_same_bits(launched(fused.quantize, groups, Grid(4)), reference.quantize(groups, Grid(4)))
    groups = torch.randn(2, 2 * groups_in_triton.MAX_GROUP)
    assert_same_bits(fused.quantize(groups, Grid(4)), reference.quantize(groups, Grid(4)))


def test_codes_and_scales_are_written_where_the_packet_has_them():
    groups, grid = values(50, 128, torch.float32, 0), Grid(4, hadamard=True)
    expected = reference.quantize(groups, grid)
    out = tuple(torch.empty_like(part, device=DEVICE) for part in expected)
    parts = fused.quantize(groups.to(DEVICE), grid, None, out)
    assert all(part is place for part, place in zip(parts, out, strict=True))
    assert_same_bits(map(torch.Tensor.cpu, out), expected)


def test_every_family_passes_its_trial():
    backends.self_test(fused, DEVICE)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU divides in one way")
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("exponent", [-122, -126, -130, -144, -149])
def test_division_without_subnormal_results(bits, exponent, monkeypatch):
    """Triton 3.3 and 3.4 compile `div_rn` to div.rn.ftz.f32: the values of a group of a range so small all
    decoded to the smallest one."""
    builder = interpreter.InterpreterBuilder
    divide = builder.create_precise_divf

    def flushing(*arguments):
        quotient = divide(*arguments)
        quotient.data[np.abs(quotient.data) < 2.0**-126] = 0
        return quotient

    monkeypatch.setattr(builder, "create_precise_divf", flushing)
    groups = torch.arange(64.0).remainder(torch.arange(1.0, 9.0)[:, None]) * 2.0**exponent
    (codes, step, _), (expected, wanted, _) = (
        backend.quantize(groups, Grid(bits)) for backend in (fused, reference)
    )
    assert_same_bits((codes, step), (expected, wanted))
