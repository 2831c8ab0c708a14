"""The error of accumulated gradients: noise averages out, bias does not."""

import math

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.message.gradient_error import AVERAGED, GradientError, estimate_gradient_error
from ds_compress.testing import relative_error

STOCHASTIC = {"name": "quantize", "bits": 2, "hadamard": True, "rounding": "stochastic"}
DEAD_ZONE = {"name": "entropy", "bits": 1.5}
SHAPE = (8, 64, 128)


def gradients(seed, shape=SHAPE):
    """Few tokens have large gradients; what all have in common is small."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shape[-1], generator=torch.Generator().manual_seed(99))
    size = torch.rand(*shape[:-1], 1, generator=generator) ** 6
    return 0.2 * common + 3 * size * torch.randn(shape, generator=generator)


def measured(choice, messages=AVERAGED, scale=1.0, dtype=torch.float32):
    codec, found, errors = build(choice), GradientError(), []
    for number in range(messages):
        x, ctx = (scale * gradients(number)).to(dtype), Context(micro_batch=number, direction="backward")
        y = codec.decode(codec.encode(x, ctx), TensorSpec.of(x), ctx)
        found.add([x], [y])
        errors.append(relative_error(x, y))
    return found, max(errors)


def test_a_dead_zone_is_worse_than_unbiased_rounding_of_twice_its_error():
    """By their relative errors it was the other way round."""
    (unbiased, large), (biased, small) = measured(STOCHASTIC), measured(DEAD_ZONE)
    assert large > 1.3 * small
    assert unbiased.value < 0.2 < 0.4 < biased.value
    assert unbiased.bias_and_total()[0] < 0.1


def test_sums_that_cancel_tell_nothing_of_unbiased_noise():
    """Behind batch normalization gradients add up to 0: recipes had an error of 1 under a CNN, and cost
    nothing."""
    found, codec = GradientError(), build(STOCHASTIC)
    for number in range(AVERAGED):
        x, ctx = gradients(number).flatten(0, 1), Context(micro_batch=number, direction="backward")
        x = x - x.mean(0)
        found.add([x], [codec.decode(codec.encode(x, ctx), TensorSpec.of(x), ctx)])
    assert found.value < 0.3
    lost = GradientError()
    lost.add([x], [torch.zeros_like(x)])
    assert lost.value > 0.3


@pytest.mark.parametrize("messages", [1, 2])
def test_few_messages_tell_a_large_bias(messages):
    assert measured(STOCHASTIC, messages)[0].value < 0.25
    assert measured(DEAD_ZONE, messages)[0].value > 0.3


@pytest.mark.parametrize(
    "scale, dtype", [(1e-30, torch.float32), (1e25, torch.float32), (1.0, torch.bfloat16)]
)
def test_units_do_not_matter(scale, dtype):
    expected = measured({"name": "topk", "density": 0.1})[0].value
    assert measured({"name": "topk", "density": 0.1}, scale=scale, dtype=dtype)[0].value == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 16), (4, 8, 6, 6)])
def test_a_share_that_is_always_lost_is_the_error(shape):
    """Whatever the shape; columns of images are their channels."""
    found = GradientError()
    for number in range(3):
        x = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(number))
        found.add([x], [0.75 * x])
    assert found.value == pytest.approx(0.25, rel=0.2)


def test_what_says_nothing_is_unknown():
    found = GradientError()
    assert math.isnan(found.value)
    found.add([torch.zeros(4, 8)], [torch.zeros(4, 8)])
    assert math.isnan(found.value)
    found.add([torch.full((4, 8), math.inf)], [torch.full((4, 8), math.nan)])
    assert math.isnan(found.value), "an overflow is not of compression's making"
    x = torch.rand(6, 16)
    found.add([x], [x])
    assert found.value == 0, "of messages of another shape nothing is kept"


def test_what_is_taken_where_no_gradients_are_at_hand():
    assert estimate_gradient_error(0.5, is_unbiased=True) < 0.2 < 0.5 < estimate_gradient_error(0.5, False)
