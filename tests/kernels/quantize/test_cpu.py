"""The compiled kernels of the CPU against their specification, bit for bit."""

import shutil

import pytest
import torch

from ds_compress import config  # noqa: F401  (registers the codecs)
from ds_compress.kernels import native
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import assert_same_bits
from tests.support.messages import values

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.parametrize("bits, size, dtype", [(8, 1 << 16, torch.float32), (5, 128, torch.float64)])
def test_what_is_not_compiled_equals_the_reference(bits, size, dtype):
    """Groups that are too large, and another dtype."""
    grid = Grid(bits)
    x = values(2 * native.LONG // size + 1, size, dtype, 3)
    parts = cpu.quantize(x, grid)
    assert_same_bits(parts, reference.quantize(x, grid))
    assert_same_bits([cpu.dequantize(parts, grid, dtype)], [reference.dequantize(parts, grid, dtype)])


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
        with pytest.raises((ValueError, RuntimeError)):  # packets may be damaged
            backend.dequantize(parts, grid, torch.float32, (2, 3, 385))
        with pytest.raises((ValueError, RuntimeError)):
            backend.dequantize(parts, grid, torch.float32, (2, 3, 512))
