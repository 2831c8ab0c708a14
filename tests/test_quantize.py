"""Codecs quantize and minmax against float64 references written here."""

import pytest
import torch

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError


def roundtrip(choice, x, **context):
    codec = build(choice)
    parts = codec.encode(x, Context(**context))
    return codec.decode(parts, TensorSpec.of(x), Context(**context))


def bits_per_value(choice, x):
    return 8 * sum(part.nbytes for part in build(choice).encode(x, Context())) / x.numel()


def relative_error(choice, x):
    return ((roundtrip(choice, x).double() - x.double()).norm() / x.double().norm()).item()


@pytest.fixture(scope="module")
def outliers():
    """Like the residual stream of a transformer: Gaussian, with 6 of 1024 channels 20 times larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, 1024, generator=generator)
    x[..., torch.randperm(1024, generator=generator)[:6]] *= 20
    return x


def test_error_and_size_on_outliers(outliers):
    assert bits_per_value({"name": "quantize"}, outliers) <= 4.26
    assert relative_error({"name": "quantize"}, outliers) <= 0.22
    assert relative_error({"name": "quantize", "bits": 8}, outliers) <= 0.015


@pytest.mark.parametrize("group_size", [8, 24, 96, "tensor", "channel"])
@pytest.mark.parametrize("scale", ["minmax", "symmetric"])
@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_at_most_half_a_step(bits, scale_dtype, scale, group_size):
    if bits == 1 and scale == "symmetric":
        pytest.skip("one bit around zero clips")
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(bits)) + 0.5
    rows = {"tensor": x.view(1, -1), "channel": x.t()}.get(group_size)
    rows = (x.view(-1, group_size) if rows is None else rows).double()
    if scale == "minmax":
        step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    else:
        step = 2 * rows.abs().amax(1) / (2**bits - 2)
    # a bf16 step may be up to 2^-7 too large, and a bf16 offset 2^-7 of itself too low
    slack = 0 if scale_dtype == "fp32" else 2**-7 * (step + 1.01 * rows.abs().amax(1) / (2**bits - 1))
    y = roundtrip(
        {"name": "quantize", "bits": bits, "scale": scale, "scale_dtype": scale_dtype, "group_size": group_size}, x
    )
    error = (y.double() - x.double()).abs()
    error = {"tensor": error.view(1, -1), "channel": error.t()}.get(group_size, error.reshape(rows.shape))
    assert (error.amax(1) <= (step + slack) / 2 * (1 + 1e-5)).all()


def test_values_on_the_grid_are_exact():
    x = torch.arange(16.0).repeat(8).view(4, 32)
    assert torch.equal(roundtrip("quantize", x), x)
    assert torch.equal(roundtrip({"name": "quantize", "scale": "symmetric"}, x.clamp(max=14) - 7), x.clamp(max=14) - 7)


def test_one_bit_around_zero_is_sign_and_mean_magnitude():
    x = torch.tensor([4.0, -2, 1, -1, 2, -4, 1, 1])
    y = roundtrip({"name": "quantize", "bits": 1, "scale": "symmetric", "group_size": 8}, x)
    assert torch.equal(y, 2 * x.sign())


@pytest.mark.parametrize("scale", ["minmax", "symmetric"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e-30, 65504.0])
def test_constants_stay(value, bits, scale):
    x = torch.full((5, 31), value)
    y = roundtrip({"name": "quantize", "bits": bits, "scale": scale}, x)
    assert torch.allclose(y, x, rtol=2**-7, atol=0) and (y == y[0, 0]).all()
    half = roundtrip({"name": "quantize", "bits": bits, "scale": scale}, x.half())
    assert torch.allclose(half, x.half(), rtol=2**-7, atol=0)


def test_minmax_matches_the_formula():
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    for bits in range(1, 9):
        top = 2**bits - 1
        wide = x.double()
        lo, hi = wide.min(), wide.max()
        expected = lo + (hi - lo) * torch.round(top * (wide - lo) / (hi - lo)) / top
        assert torch.allclose(roundtrip({"name": "minmax", "bits": bits}, x).double(), expected, atol=1e-6, rtol=0)


def test_minmax_rounds_ties_to_even_and_costs_two_scalars():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0, 3, 3, 3])
    assert roundtrip({"name": "minmax", "bits": 2}, x).tolist() == [0, 0, 2, 2, 3, 3, 3, 3]
    parts = build({"name": "minmax", "bits": 2}).encode(x, Context())
    assert sum(part.nbytes for part in parts) == 2 + 8


def test_minmax_keeps_constants():
    x = torch.full((3, 5), 0.1)
    assert torch.equal(roundtrip("minmax", x), x)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"bits": 9}, "codec.bits: 9 is not allowed: should be less than or equal to 8"),
        ({"group_size": 12}, "codec.group_size: 12: allowed: a positive multiple of 8, 'tensor', 'channel'"),
        ({"group_size": "row"}, "codec.group_size: 'row': allowed: a positive multiple of 8, 'tensor', 'channel'"),
        ({"scale": "asym"}, "codec.scale: 'asym' is not allowed; allowed: 'minmax', 'symmetric'"),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(CompressionError) as error:
        build({"name": "quantize", **options})
    assert str(error.value) == reason
