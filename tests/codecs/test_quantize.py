"""Codec quantize: what its grids, its rotation and its ways of rounding promise."""

import math

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels import native
from ds_compress.kernels.quantize.hadamard import diagonal, key_of, rotate, rotate_back
from ds_compress.testing import relative_error
from tests.support.codecs import Pair, bits_per_value, error_of, roundtrip
from tests.support.messages import residual_stream

CPU = torch.device("cpu")


def quantize(**options):
    return {"name": "quantize", **options}


@pytest.mark.parametrize("size", [2, 32, 128])
def test_the_rotation_is_that_of_walsh_and_hadamard(size):
    """Of each row, with the signs of the key: row i of the matrix is (-1)^popcount(i & j) / sqrt(size)."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = diagonal(size, key_of(0), CPU)[:, None] * torch.tensor(rows)
    x = torch.randn(12, size)
    torch.testing.assert_close(rotate(x, key_of(0)), x @ matrix)
    torch.testing.assert_close(rotate_back(x @ matrix, key_of(0)), x)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_arrive_at_the_nearest_point_of_a_grid(bits, hadamard):
    """It reaches from the smallest value of a group to the largest, both rounded outwards to bf16; groups are
    runs of the values as they lie in memory."""
    x = torch.randn(2, 4, 48, generator=torch.Generator().manual_seed(bits)) + 0.5
    codec, top = build(quantize(bits=bits, group_size=32, hadamard=hadamard)), 2**bits - 1
    _, step, offset, *_ = parts = codec.encode(x, Context())
    both = (each.view(12, 32) for each in (x, codec.decode(parts, TensorSpec.of(x), Context())))
    groups, arrived = (rotate(each, key_of(0)) if hadamard else each for each in both)
    step, offset = step.float()[:, None], offset.float()[:, None]
    code = (arrived - offset) / step
    assert (code - code.round().clamp(0, top)).abs().max() < 1e-3
    assert ((arrived - groups).abs() <= step / 2 + 1e-5).all()
    low, high = groups.aminmax(dim=1, keepdim=True)
    assert ((low - offset >= 0) & (low - offset <= low.abs() / 128)).all()
    excess = offset + top * step - high
    assert ((excess >= -1e-6) & (excess <= top * step / 128)).all()


def test_sizes_and_errors_promised():
    """Bits include scales; the errors are those of a float64 model, with a margin."""
    hidden, plain, rotated = residual_stream(), quantize(), quantize(hadamard=True)
    assert bits_per_value(plain, hidden) == bits_per_value(rotated, hidden) == 4.25
    assert error_of(rotated, hidden) <= 0.09
    assert error_of(plain, hidden) >= 2 * error_of(rotated, hidden)
    assert bits_per_value({**rotated, "bits": 2}, hidden) == 2.25
    assert error_of({**rotated, "bits": 2}, hidden) <= 0.45
    assert error_of({**plain, "bits": 8}, hidden) <= 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"hadamard": True}])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_only_the_group_that_holds_it_is_non_finite(value, options, dtype):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = roundtrip(quantize(**options), x)
    x[2, 77] = value
    decoded = roundtrip(quantize(**options), x)
    assert decoded[2].isnan().all()
    assert torch.equal(decoded[[0, 1, 3]], expected[[0, 1, 3]])


def test_values_on_the_grid_are_exact_however_rounded():
    x = torch.arange(16.0).repeat(8).view(4, 32)
    for rounding in ("nearest", "stochastic"):
        assert torch.equal(roundtrip({"name": "quantize", "rounding": rounding}, x), x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e-30, 65504.0])
def test_constants_stay(value, bits):
    for dtype in (torch.float32, torch.float16):
        x = torch.full((5, 31), value, dtype=dtype)
        y = roundtrip({"name": "quantize", "bits": bits}, x)
        assert torch.allclose(y, x, rtol=2**-7, atol=0) and (y == y[0, 0]).all()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(bits, hadamard):
    row = torch.randn(32, generator=torch.Generator().manual_seed(3))
    x = row.repeat(40_000, 1)  # often enough for what is rarely rounded away from the nearest code
    options = quantize(group_size=32, bits=bits, hadamard=hadamard)
    y = roundtrip({**options, "rounding": "stochastic"}, x)
    deviation = (y - x).std(0) / math.sqrt(len(x))
    assert ((y.mean(0) - row).abs() <= 5 * deviation + 1e-5).all()
    biased = roundtrip(options, x)
    assert ((biased.mean(0) - row).abs() > 5 * deviation + 1e-5).any()  # so that the line above can fail


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("least_for_kernels", [1 << 40, 1], ids=["PyTorch", "C++"])
def test_the_largest_value_of_a_group_stays_the_largest(rounding, least_for_kernels, monkeypatch):
    """With 8 bits and the largest draw its code was 256, which is 0 in a byte: the smallest value."""
    monkeypatch.setattr(native, "LONG", least_for_kernels)
    x = torch.full((1 << 14, 128), 255.0)
    x[:, ::32] = 0.0
    for step, group_size in enumerate((32, 64, 128)):  # also where code of groups of that size differs
        choice = quantize(bits=8, group_size=group_size, rounding=rounding)
        assert (roundtrip(choice, x, step=step) - x).abs().max() <= 1


def test_rotation_keeps_fp32_under_autocast():
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    choice = {"name": "quantize", "bits": 8, "hadamard": True}
    with torch.autocast("cpu", torch.bfloat16):
        inside = roundtrip(choice, x)
    assert torch.equal(inside, roundtrip(choice, x))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("numel, group_size", [(5125, 128), (5125, 4096), (7, 128), (129, 128), (1, 8)])
def test_a_partial_group_loses_no_more_than_a_whole_one(bits, numel, group_size):
    """The last 5 of 5,125 values came out with an error of 2.59, and a group of 4096 ruined all of them."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(3)) + 3
    choice = quantize(bits=bits, group_size=group_size, hadamard=True)
    whole = error_of(choice, torch.randn(64 * group_size, generator=torch.Generator().manual_seed(4)) + 3)
    tail = slice(numel // group_size * group_size, None)
    assert relative_error(x[tail], roundtrip(choice, x)[tail]) <= 1.5 * whole + 0.01


def test_signs_are_those_of_the_seed_and_the_same_everywhere():
    signs = torch.stack([diagonal(4096, key_of(seed), CPU).sign() for seed in (0, 1, 1234, 2**62)])
    assert signs.mean(1).abs().max() < 0.06
    assert (signs @ signs.T / 4096 - torch.eye(4)).abs().max() < 0.06
    first = [1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert torch.equal(diagonal(16, key_of(1234), CPU).sign(), 1 - 2 * torch.tensor(first))
    x = torch.randn(3, 128)
    codec = build(quantize(bits=2, hadamard=True))
    packets = [codec.encode(x, Context(seed=seed, step=step)) for seed, step in ((1, 0), (1, 5), (2, 0))]
    assert torch.equal(packets[0][0], packets[1][0]) and not torch.equal(packets[0][0], packets[2][0])
    other_seed = codec.decode(packets[0], TensorSpec.of(x), Context(seed=2))
    assert (other_seed - x).norm() > x.norm()


@pytest.mark.parametrize("mean", [1.0, 10.0, -3.0])
def test_a_mean_costs_nothing(mean):
    """Without signs it was one coefficient, which set the grid: five to fifty times the error."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4):
        choice = quantize(bits=bits, hadamard=True)
        assert error_of(choice, x + mean) <= 1.1 * error_of(choice, x)


@pytest.mark.parametrize("shape, bits", [((3, 5, 128), 0), ((4, 256), 0), ((9, 96), 2), ((1, 96), 0)])
@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_only_groups_that_cross_rows_cost_a_bit_a_row(shape, bits, rounding):
    layout = build(quantize(rounding=rounding)).layout(TensorSpec(shape, torch.float32))
    assert layout[3:] == ((((bits,), torch.uint8),) if bits else ())


@pytest.mark.parametrize("feedback", ["ef", "loco", "ef21"])
@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_a_row_of_zeros_has_no_residual(rounding, feedback):
    """Fused with the kernel or not; the row arrives as zeros in every step."""
    pair = Pair(quantize(rounding=rounding), feedback)
    for step in range(3):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))
        x[3] = 0
        x[5] *= step < 2  # what it lost before arrives
        y = pair(x, step=step)
        assert (y[3] == 0).all() and (y[:3].any(1) & y[4:7].any(1)).all()
        assert all((kept[3] == 0).all() for kept in pair.sender.values() if kept.shape == x.shape)
