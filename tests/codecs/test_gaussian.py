"""The grid for normal values and the rotation with signs, against references in float64 written here."""

import math

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels.quantize import gaussian
from ds_compress.kernels.quantize.hadamard import diagonal, key_of, rotate, rotate_back
from tests.support.codecs import bits_per_value, error_of, roundtrip
from tests.support.messages import residual_stream

ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}  # squared, of normal values: Max 1960, table I
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hidden():
    return residual_stream()


def quantize(**options):
    return {"name": "quantize", **options}


@pytest.mark.parametrize("bits", ERRORS)
def test_levels_are_those_of_lloyd_and_max(bits):
    """Each level is the mean of the values nearest to it, and the error is the published one."""
    x = torch.linspace(0, 9, 900_001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2)
    levels = torch.tensor(gaussian.levels(bits), dtype=torch.float64)
    middles = torch.tensor(gaussian.squared_boundaries(bits), dtype=torch.float64).sqrt()
    assert torch.allclose(middles, (levels[1:] + levels[:-1]) / 2, atol=2e-5)
    place = torch.bucketize(x, middles)
    for i, level in enumerate(levels):
        inside = place == i
        mean = (x * weight)[inside].sum() / weight[inside].sum()
        assert abs(mean - level) < 3e-5
    error = ((x - levels[place]).square() * weight).sum() / weight.sum()
    assert error == pytest.approx(ERRORS[bits], abs=6e-5)
    assert gaussian.normal_error(bits) == pytest.approx(math.sqrt(error), rel=1e-3)


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("scale_dtype, digits", [("bf16", 8), ("fp32", 24)])
def test_matches_the_reference(bits, scale_dtype, digits):
    rows = (
        torch.randn(50, 64, generator=torch.Generator().manual_seed(bits))
        * torch.logspace(-9, 9, 50)[:, None]
    )
    x = rows.double()
    levels = torch.tensor(gaussian.levels(bits), dtype=torch.float64)
    middles = torch.tensor(gaussian.squared_boundaries(bits), dtype=torch.float64).sqrt()
    unit = x.abs() / x.square().mean(1, keepdim=True).sqrt()
    code = levels[torch.bucketize(unit, middles)] * x.sign()
    scale = (x * code).sum(1) / code.square().sum(1)
    decoded = roundtrip(quantize(bits=bits, grid="gaussian", group_size=64, scale_dtype=scale_dtype), rows)
    assert torch.allclose(decoded.double(), code * scale[:, None], rtol=2.0**-digits + 1e-6, atol=0)


def test_no_scale_of_the_wire_would_lose_less():
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).exp()
    codec = build(quantize(bits=2, grid="gaussian", scale_dtype="fp32"))
    packed, scale = codec.encode(x, Context())
    spec = TensorSpec.of(x)
    errors = [
        (codec.decode((packed, scale * factor), spec, Context()) - x).square().sum(1)
        for factor in (0.99, 1.0, 1.01)
    ]
    assert (errors[1] <= errors[0]).all() and (errors[1] <= errors[2]).all()


def test_sizes_and_errors_promised(hidden):
    """The default grid of rotated groups of 3 bits or less costs less and loses less than the uniform one."""
    for bits, error in ((1, 0.61), (2, 0.34), (3, 0.185), (4, 0.1)):
        rotated = quantize(bits=bits, hadamard=True)
        new, old = {**rotated, "grid": "gaussian"}, {**rotated, "grid": "uniform"}
        assert bits_per_value(new, hidden) == bits + 0.125
        assert bits_per_value(old, hidden) == bits + 0.25
        assert error_of(new, hidden) <= error
        assert bits_per_value(rotated, hidden) == bits + (0.125 if bits <= 3 else 0.25)
    assert bits_per_value(quantize(bits=2, hadamard=True, scheme="symmetric"), hidden) == 2.125
    assert error_of(quantize(bits=2, hadamard=True), hidden) < error_of(
        quantize(bits=2, hadamard=True, grid="uniform"), hidden
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("numel, group_size", [(5125, 128), (5125, 4096), (7, 128), (129, 128), (1, 8)])
def test_a_partial_group_loses_no_more_than_a_whole_one(bits, numel, group_size):
    """The last 5 of 5,125 values came out with an error of 2.59, and a group of 4096 ruined all of them."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(3)) + 3
    choice = quantize(bits=bits, group_size=group_size, hadamard=True)
    whole = error_of(choice, torch.randn(64 * group_size, generator=torch.Generator().manual_seed(4)) + 3)
    decoded = roundtrip(choice, x)
    tail = slice(numel // group_size * group_size, None)
    lost = (decoded - x)[tail].norm() / x[tail].norm()
    assert lost <= 1.5 * whole + 0.01


def test_signs_are_those_of_the_seed_and_the_same_everywhere():
    signs = [diagonal(4096, key_of(seed), CPU).sign() for seed in (0, 1, 1234, 2**62)]
    for i, one in enumerate(signs):
        assert abs(one.mean()) < 0.06
        for other in signs[:i]:
            assert abs((one * other).mean()) < 0.06
    assert torch.equal(diagonal(16, key_of(1234), CPU).sign(), 1 - 2 * torch.tensor(SIGNS_OF_1234))
    x = torch.randn(3, 128)
    codec = build(quantize(bits=2, hadamard=True))
    packets = [codec.encode(x, Context(seed=seed, step=step)) for seed, step in ((1, 0), (1, 5), (2, 0))]
    assert torch.equal(packets[0][0], packets[1][0]) and not torch.equal(packets[0][0], packets[2][0])
    other_seed = codec.decode(packets[0], TensorSpec.of(x), Context(seed=2))
    assert (other_seed - x).norm() > x.norm()


SIGNS_OF_1234 = [1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("size", [8, 128, 4096])
def test_the_rotation_is_orthonormal(size):
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, 77)
    assert torch.allclose(rotated.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose(rotate_back(rotated, 77), x, atol=1e-5)


@pytest.mark.parametrize("mean", [1.0, 10.0, -3.0])
def test_a_mean_costs_nothing(mean):
    """Without signs it was one coefficient, which set the grid: five to fifty times the error."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4):
        choice = quantize(bits=bits, hadamard=True)
        assert error_of(choice, x + mean) <= 1.1 * error_of(choice, x)


def test_maps_behind_a_relu():
    """Signs halve what a rotation loses there; with uniform grids none of them beats no rotation."""
    maps = torch.randn(8, 16, 32, 32, generator=torch.Generator().manual_seed(0)).sub(0.5).relu()
    signs = error_of(quantize(bits=4, hadamard=True), maps)
    assert error_of(quantize(bits=4), maps) < signs < 0.12
