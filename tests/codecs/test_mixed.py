"""Two widths in one message: which group gets which, and what it costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import TensorSpec, build
from tests.support.codecs import roundtrip

TILE = 32


def tiles_with_spikes(tiles, spiked):
    """Gaussian tiles, of which those in `spiked` are one large value among small ones: of low entropy."""
    x = torch.randn(tiles, TILE, generator=torch.Generator().manual_seed(0)) + 3
    x[spiked] *= 1e-3
    x[spiked, 5] = 7
    return x


@pytest.mark.parametrize("extra", [{}, {"hadamard": True}, {"scheme": "symmetric"}])
def test_low_entropy_gets_few_bits(extra):
    x = tiles_with_spikes(10, [2, 9])
    plain = {"name": "quantize", "group_size": TILE, **extra}
    expected = roundtrip(plain, x)
    expected[[2, 9]] = roundtrip({**plain, "bits": 2, "grid": "uniform"}, x[[2, 9]])
    assert torch.equal(roundtrip({**plain, "mixed": {"share": 0.8, "low_bits": 2}}, x), expected)


def test_width_ignores_the_size_of_values():
    x = tiles_with_spikes(10, [0, 1])
    choice = {"name": "quantize", "group_size": TILE, "mixed": {}}
    factors = torch.tensor([2.0**i for i in (0, -90, 5, 60, -3, 0, 9, -70, 1, 2)])[:, None]
    assert torch.equal(roundtrip(choice, x * factors), roundtrip(choice, x) * factors)


def test_equal_tiles_are_told_apart_by_position():
    x = torch.randn(TILE, generator=torch.Generator().manual_seed(0)).repeat(10, 1)
    plain = {"name": "quantize", "group_size": TILE}
    mixed = roundtrip({**plain, "mixed": {"share": 0.3, "low_bits": 1}}, x)
    assert torch.equal(mixed[:3], roundtrip(plain, x)[:3])
    assert torch.equal(mixed[3:], roundtrip({**plain, "bits": 1}, x)[3:])


@settings(deadline=None)
@given(st.integers(0, 300), st.floats(0, 1), st.integers(1, 3))
def test_size_is_counted_exactly(tiles, share, low_bits):
    codec = build({"name": "quantize", "group_size": TILE, "mixed": {"share": share, "low_bits": low_bits}})
    layout = codec.layout(TensorSpec((tiles, TILE), torch.float32))
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)
    high = round(share * tiles)
    codes = (4 * high + low_bits * (tiles - high)) * TILE // 8
    assert size == codes + 2 * 2 * tiles + (tiles + 7) // 8
