"""The compiled kernels of quantization against their specification, bit for bit, on every processor."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels import native
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.numerics import LARGEST_STATE
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import any_grid, assert_same_bits
from tests.support.kernels import EACH_TARGET, GROUPS, alike, compiled_for
from tests.support.messages import values


@EACH_TARGET
@settings(max_examples=80, deadline=None, database=None)
@given(
    **GROUPS,
    size=st.sampled_from([8, 16, 24, 32, 40, 64, 128, 256, 1024, 4096]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    n=st.integers(1, 300),
    dither=st.integers(0, 2**64 - 1),
)
def test_quantization_has_the_same_bits_on_every_processor(
    target, bits, size, dtype, hadamard, n, special, seed, dither
):
    grid = any_grid(bits, hadamard, size, seed)
    x = values(n, size, dtype, seed, special)
    with compiled_for(target):
        for key in (None, dither):
            parts = alike(lambda backend: backend.quantize(x, grid, key))
            for out in (torch.float32, torch.bfloat16):
                alike(lambda backend: backend.dequantize(parts, grid, out, None, key))


@EACH_TARGET
def test_messages_beyond_the_caches_have_the_same_bits(target):
    """What they decode to, also with a state, goes past the caches beyond 8 MiB of fp32, if it is aligned."""
    grid = Grid(bits=4)
    x, state = (values(40_005, 128, torch.float32, seed) for seed in (0, 4))
    state = state.clamp(-LARGEST_STATE, LARGEST_STATE)
    parts = reference.quantize(x, grid)
    with compiled_for(target):
        for out, dither in itertools.product((torch.float32, torch.bfloat16), (None, 77)):
            alike(lambda backend: backend.dequantize(parts, grid, out, None, dither))
        for scale in (1.0, 3.0):
            parts = reference.quantize_change(x, state, scale, grid, 128)[0]
            alike(lambda each: each.dequantize_change(parts, state.clone(), scale, grid, torch.float32))


def test_groups_of_subnormal_numbers_have_steps_with_an_inverse():
    """Codes are made by a product with 1 / step, which is infinite for the smallest numbers."""
    x = torch.linspace(-1, 1, 256).mul(3e-39).view(2, 128)
    zeros = torch.zeros(1, 128)
    for grid in (Grid(1), Grid(4), Grid(8)):
        parts = alike(lambda backend: backend.quantize(x, grid))
        assert (reference.dequantize(parts, grid) - x).abs().max() <= 2.0**-126
        assert not reference.dequantize(reference.quantize(zeros, grid), grid).any()


@pytest.mark.parametrize("bits, size, dtype", [(8, 1 << 16, torch.float32), (5, 128, torch.float64)])
def test_what_is_not_compiled_equals_the_reference(bits, size, dtype):
    """Groups that are too large, and another dtype."""
    grid = Grid(bits)
    x = values(2 * native.LONG // size + 1, size, dtype, 3)
    parts = alike(lambda backend: backend.quantize(x, grid))
    alike(lambda backend: backend.dequantize(parts, grid, dtype))


@pytest.mark.parametrize("served", [True, False])
def test_groups_may_lie_in_a_tensor_of_any_shape(served, monkeypatch):
    """A view of each message took as long as its arithmetic."""
    if not served:
        monkeypatch.setattr(native, "serves", lambda *_: False)
    shape, grid = (2, 3, 384), Grid(4)
    x = values(18, 128, torch.float32, 7)
    parts = reference.quantize(x, grid)
    for backend in (cpu, reference):
        assert_same_bits(backend.quantize(x.view(shape), grid, None, None, 128), parts)
        decoded = backend.dequantize(parts, grid, torch.float32, shape)
        assert_same_bits([decoded], [reference.dequantize(parts, grid).view(shape)])
        for width in (385, 512):
            with pytest.raises((ValueError, RuntimeError)):  # packets may be damaged
                backend.dequantize(parts, grid, torch.float32, (2, 3, width))
