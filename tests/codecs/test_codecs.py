"""Hold every codec to its contract and its bounds, with many options; refuse others in one line."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress import testing
from ds_compress.codec import Context, TensorSpec, build, names
from ds_compress.codecs import bounds
from ds_compress.testing import CodecPair, relative_error
from tests.support.codecs import error_of
from tests.support.refusals import refusal

OPTIONS = {
    "quantize": [
        *({"bits": bits} for bits in (2, 3, 5, 6, 7)),
        *({"group_size": 24}, {"rounding": "stochastic"}),
        {"bits": 3, "group_size": 64, "rounding": "dither"},
        {"bits": 1, "hadamard": True, "rounding": "stochastic", "group_size": 16},
        {"group_size": 8, "hadamard": True},
    ],
    "entropy": [{"bits": bits} for bits in (0.1, 6, 2.6180339887)],
    "fp8": [{"group_size": 24, "format": "e5m2"}],
    "topk": [
        {"rows": "tensor", "indices": "bitmask", "values": "bf16"},
        *({"density": 0.01, "indices": "int16"}, {"density": 0.7, "indices": "int32", "values": "fp16"}),
        *({"density": 1.0}, {"indices": "rice"}),
    ],
    "lowrank": [{"rank": 1}, {"rank": 20, "dtype": "fp32"}],
    "randomk": [{"values": {"name": "quantize", "rounding": "stochastic"}}, {"rows": "tensor"}],
}

WORSE_THAN_ZEROS = [{"name": "minmax", "bits": 1}, {"name": "quantize", "bits": 1}]
"""With two levels at the extremes every value is far off; the settings exist for those who know better."""


def choices():
    for name in names():
        found = testing.settings_of(name)
        yield from found
        more = ({"name": name, **options} for options in OPTIONS.get(name, ()))
        yield from (setting for setting in more if setting not in found)
    yield from WORSE_THAN_ZEROS


def label(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={item}" if key != "name" else item for key, item in value.items())
    return value.__name__.removeprefix("check_")


def trial_of(choice):
    """With the gradient of a top-k going back at the entries that it selected."""
    backward = {**choice, "indices": "reuse"} if choice["name"] == "topk" else None
    return CodecPair(choice, backward, torch.device("cpu"))


@pytest.mark.parametrize("check", testing.CHECKS, ids=label)
@pytest.mark.parametrize("choice", choices(), ids=label)
def test_contract(choice, check):
    if choice in WORSE_THAN_ZEROS and check is testing.check_gaussian_error:
        with pytest.raises(AssertionError, match="of normal values; sending zeros loses 1, at float32"):
            check(trial_of(choice))
    else:
        check(trial_of(choice))


@pytest.mark.parametrize("choice", choices(), ids=label)
def test_declared_errors_are_near_those_measured(choice):
    """A bound that anything would keep says nothing about the codec."""
    trial = trial_of(choice)
    for spec in trial.specs([(8, 33, 65)], [torch.float32]):
        sent = testing.normal(spec, seed=2), testing.normal(spec, seed=3)
        for codec, x, arrived in zip(trial.codecs, sent, trial.exchange(*sent)):
            measured = testing.relative_error(x, arrived)
            assert codec.gaussian_error_bound(spec) <= 5 * measured + 2.0**-8
            assert codec.error_bound(spec) >= measured


def test_keeps_no_graph():
    """A stage sends its output with the graph that made it."""
    codec, x, sender = build("lowrank"), torch.randn(64, 16, requires_grad=True), Context()
    assert not any(value.requires_grad for value in (*codec.encode(x, sender), *sender.memory.values()))
    assert sender.memory


POWER = "needs a group_size that is a power of two, not"
REFUSED = {
    "quantize": [
        ({"group_size": 12}, "codec.group_size: 12 is not allowed: should be a multiple of 8"),
        ({"group_size": "row"}, "codec.group_size: 'row' is not allowed: should be a valid integer"),
        ({"hadamard": True, "group_size": 24}, f"codec.hadamard: True {POWER} 24"),
        ({"group_size": "tensor"}, "codec.group_size: 'tensor' is not allowed (removed: use 128, or codec"),
        ({"scheme": "symmetric"}, "codec.scheme: unknown key (removed: grids reach from the smallest to the"),
    ],
    "fp8": [({"group_size": "row"}, "'row' is not allowed; allowed: 'tensor', or an integer")],
    "topk": [
        ({"values": "bf61"}, "did you mean 'bf16'"),
        ({"values": "topk"}, "'topk' cannot carry the kept values"),
        ({"select": "block"}, "select: 'block' is not allowed; allowed: 'exact', 'sidco'"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    for options, reason in REFUSED[name]:
        assert reason in refusal(build, {"name": name, **options})


HOSTILE = [0.0, 1e-6, 0.01, 0.3, 0.5, 1.0, 1.0, 3.0, 1e4]


@pytest.mark.parametrize("choice", choices(), ids=label)
@pytest.mark.extended(keep=10)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(HOSTILE), st.sampled_from([-1, 1])), min_size=1, max_size=70),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_no_input_breaks_the_error_bound(choice, values, columns, step):
    pair = trial_of(choice)
    x = torch.tensor([size * sign for size, sign in values]).repeat_interleave(columns).view(-1, columns)
    codec, (arrived, _) = pair.codecs[0], pair.exchange(x, x, step=step)
    assert relative_error(x, arrived) <= codec.error_bound(TensorSpec.of(x)) * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("steps", [1, 3, 15])
def test_grid_is_what_the_worst_input_loses(steps):
    """Two values span the grid, all others lie halfway between two of its points."""
    choice, n = {"name": "minmax", "bits": (steps + 1).bit_length() - 1}, 4096
    x = torch.full((n,), 1e-6 if steps % 2 else 1 / steps)
    x[0], x[1] = -1, 1
    assert bounds.grid(n, steps) == build(choice).error_bound(TensorSpec.of(x))
    assert 0.9 * bounds.grid(n, steps) < error_of(choice, x) <= bounds.grid(n, steps)


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
