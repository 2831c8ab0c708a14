"""Declared error bounds: their pieces against sampling, whole codecs against inputs made to break them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_compress.codecs  # noqa: F401  (registers)
from ds_compress.codec import CODECS, Context, TensorSpec, build
from ds_compress.codecs import bounds
from ds_compress.testing import relative_error

ANY_INPUT = [
    *(
        {"name": "quantize", "bits": bits, "scheme": scheme, "group_size": size, "rounding": rounding}
        for bits in (1, 2, 4)
        for scheme in ("asymmetric", "symmetric")
        for size in (16, "tensor")
        for rounding in ("nearest", "stochastic")
        if (bits, scheme, rounding) != (1, "symmetric", "nearest")
    ),
    *(
        {"name": "quantize", "bits": bits, "scheme": scheme, "group_size": 16, "hadamard": True}
        for bits, scheme in ((1, "asymmetric"), (3, "asymmetric"), (3, "symmetric"))
    ),
    *(
        {"name": "quantize", "bits": bits, "grid": "gaussian", "group_size": 16, "hadamard": hadamard}
        for bits in (1, 2, 3, 4)
        for hadamard in (False, True)
    ),
    *({"name": name, "bits": bits} for name in ("minmax", "acsgd") for bits in (1, 2, 4, 8)),
    *({"name": "fp8", "format": format, "group_size": 8} for format in ("e4m3", "e5m2")),
    {"name": "topk", "density": 0.3},
    {"name": "topk", "density": 0.3, "values": {"name": "quantize", "bits": 2}},
    {"name": "randomk", "density": 0.3},
    *({"name": name} for name in ("bf16", "fp16", "lowrank")),
]
SIZES = [0.0, 1e-6, 0.01, 0.3, 0.5, 1.0, 1.0, 3.0, 1e4]


@pytest.mark.parametrize("choice", ANY_INPUT, ids=lambda choice: "-".join(map(str, choice.values())))
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from([-1, 1])), min_size=1, max_size=70),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_no_input_breaks_the_error_bound(choice, values, columns, step):
    codec = build(choice)
    x = torch.tensor([size * sign for size, sign in values]).repeat_interleave(columns).view(-1, columns)
    ctx = Context(step=step)
    arrived = codec.decode(
        codec.encode(x, ctx), TensorSpec.of(x), Context(step=step, memory=dict(ctx.memory))
    )
    assert relative_error(x, arrived) <= codec.error_bound(TensorSpec.of(x)) * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("steps", [1, 3, 15])
def test_grid_is_what_the_worst_input_loses(steps):
    """Two values span the grid, all others lie halfway between two of its points."""
    codec, n = build({"name": "minmax", "bits": (steps + 1).bit_length() - 1}), 4096
    x = torch.full((n,), 1e-6 if steps % 2 else 1 / steps)
    x[0], x[1] = -1, 1
    error = relative_error(x, codec.decode(codec.encode(x, Context()), TensorSpec.of(x), Context()))
    assert 0.9 * bounds.grid(n, steps) < error <= bounds.grid(n, steps) == codec.error_bound(TensorSpec.of(x))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("low, high, steps", [(-2.5, 2.5, 3), (-3, 3, 15), (-0.8, 0.8, 1), (-4, 0, 1)])
def test_normal_values_on_a_grid(low, high, steps, stochastic):
    x = torch.randn(200_000, dtype=torch.float64)
    position = ((x - low) / (high - low) * steps).clamp(0, steps)
    code = (position + torch.rand_like(x)).floor() if stochastic else position.round()
    sampled = relative_error(x, low + code.clamp(0, steps) * (high - low) / steps)
    assert bounds.normal_on_grid(low, high, steps, stochastic) == pytest.approx(sampled, rel=0.01)


def test_largest_normal_is_exceeded_once_in_a_hundred_times():
    largest = torch.randn(20_000, 100).abs().amax(1)
    assert (largest > bounds.largest_normal(100)).double().mean().item() == pytest.approx(0.01, abs=0.004)


@pytest.mark.parametrize("share, error", [(0.1, 0.0), (0.3, 0.5), (0.9, 0.1)])
def test_parts(share, error):
    """Equal values are the worst for the largest part; a random one gets near what is said of it."""
    n, kept = 10_000, int(share * 10_000)
    assert bounds.largest_part(share, error) == pytest.approx(math.sqrt(1 - share + share * error**2))
    x, sent = torch.randn(n), torch.zeros(n)
    sent[:kept] = x[:kept] * (1 - error)
    assert relative_error(x, sent) <= bounds.random_part(share, error) <= 1.3 * relative_error(x, sent)
    assert bounds.largest_part(share, 2.0) == 2.0 and bounds.random_part(1.0, 0.0) == 0.0


@pytest.mark.parametrize("name", ["none", "lossless"])
def test_lossless_codecs_declare_no_error(name):
    assert build(name).error_bound(TensorSpec((3, 5), torch.float32)) == 0


def test_every_codec_declares_finite_bounds_for_every_example_and_shape():
    for name in CODECS.names():
        for options in CODECS.find(name, "codec").examples:
            codec = build({"name": name, **options})
            for shape in [(), (0,), (1,), (2, 0, 4), (3, 5), (4, 2048, 4096)]:
                spec = TensorSpec(shape, torch.bfloat16)
                assert 0 <= codec.gaussian_error_bound(spec) < math.inf
                assert 0 <= codec.error_bound(spec) < math.inf
