"""Codec quantize with "hadamard": "auto": never worse than with a rotation, nor than without."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.kernels import dispatch, reference
from tests.support import captured
from tests.support.matrices import any_shape
from tests.support.measure import bits_per_value, relative_error, residual_stream, roundtrip

WAYS = (False, True)


def choice(hadamard, **options):
    return {"name": "quantize", **options, "hadamard": hadamard}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("model", ["transformer", "cnn"])
@pytest.mark.parametrize("direction", [0, 1])
def test_is_never_worse_on_messages_of_models(model, direction, bits):
    """In the bytes of codes without a rotation: which groups are rotated costs none."""
    for x in getattr(captured, model)()[direction]:
        either, plain, rotated = (choice(way, bits=bits) for way in ("auto", *WAYS))
        assert bits_per_value(either, x) == bits_per_value(plain, x)
        best = min(relative_error(plain, x), relative_error(rotated, x))
        assert relative_error(either, x) <= best * (1 + 1e-6)


def test_saves_where_groups_are_not_alike():
    """Outliers in some, zeros in others."""
    outliers = residual_stream()[0, :64]
    zeros = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).relu()
    x = torch.cat([outliers / outliers.norm(), zeros / zeros.norm()])
    best = min(relative_error(choice(way, bits=4), x) for way in WAYS)
    assert relative_error(choice("auto", bits=4), x) < 0.85 * best


OPTIONS = st.fixed_dictionaries(
    {"bits": st.integers(1, 8), "group_size": st.sampled_from([8, 32, 128])},
    optional={
        "scheme": st.sampled_from(["asymmetric", "symmetric"]),
        "scale_dtype": st.sampled_from(["bf16", "fp32"]),
        "axis": st.sampled_from([-1, 0]),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    x=any_shape(longest=20),
    options=OPTIONS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    power=st.integers(-60, 60),
)
def test_each_group_is_one_of_the_two(x, options, dtype, power):
    """The one that loses less, however large the values are, and whatever is missing at the end."""
    if not x.dim():
        options["axis"] = -1
    x = (x.float() * 2.0**power).to(dtype)
    x = x[..., ::2] if x.dim() and x.shape[-1] > 1 else x  # not contiguous
    both = [roundtrip(choice(way, **options), x) for way in WAYS]
    either = roundtrip(choice("auto", **options), x)
    assert ((either == both[0]) | (either == both[1])).all()
    errors = [(y.double() - x.double()).norm() for y in (either, *both)]
    assert errors[0] <= min(errors[1:]) * (1 + 1e-5)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("special", [torch.inf, torch.nan])
def test_what_is_not_finite_shows(bits, special):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[3, 5] = special
    y = roundtrip(choice("auto", bits=bits), x)
    assert not y[3].isfinite().all() and y[:3].isfinite().all() and y[4:].isfinite().all()


def test_values_near_the_largest_number_are_not_rotated():
    """Their sums are beyond it."""
    x = torch.full((2, 128), 3e38)
    assert roundtrip(choice("auto"), x).isfinite().all()


@pytest.mark.parametrize("bits", [2, 4])
def test_all_backends_choose_alike(bits):
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0))
    x[::2] = x[::2].relu() + 0.1
    codec = build(choice("auto", bits=bits))
    parts = codec.encode(x, Context())
    assert parts[1].signbit().any() and not parts[1].signbit().all()
    with dispatch.using(reference):
        expected = codec.encode(x, Context())
        decoded = codec.decode(expected, TensorSpec.of(x), Context())
    assert all(map(torch.equal, parts, expected))
    assert torch.equal(codec.decode(parts, TensorSpec.of(x), Context()), decoded)


@pytest.mark.parametrize(
    "options, reason",
    [
        (
            {"rounding": "stochastic"},
            "codec.hadamard: 'auto' goes with rounding 'nearest': what is lost by chance tells nothing",
        ),
        ({"mixed": {}}, "codec.mixed: {} goes with a hadamard that is true or false, not with 'auto'"),
        (
            {"group_size": 24},
            "codec.hadamard: 'auto' needs a group_size that is a power of two, not 24",
        ),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(CompressionError) as error:
        build(choice("auto", **options))
    assert str(error.value) == reason


def test_a_word_that_is_none():
    with pytest.raises(CompressionError, match="codec.hadamard: 'atuo' is not allowed"):
        build(choice("atuo"))
