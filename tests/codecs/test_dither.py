"""Subtractive dither: the error of a message does not depend on its values, and its mean is 0."""

import math

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build

CODECS = [
    {"name": "entropy", "bits": 2},
    {"name": "entropy", "bits": 2, "contexts": "rows"},
    {"name": "entropy", "bits": 2, "contexts": "columns"},
    {"name": "quantize", "bits": 2, "hadamard": True},
    {"name": "quantize", "bits": 3, "scheme": "symmetric", "group_size": 64},
]


def send(setting, x, step):
    codec, ctx = build({**setting, "rounding": "dither"}), Context(step=step)
    return codec.decode(codec.encode(x, ctx), TensorSpec.of(x), ctx)


@pytest.mark.parametrize("setting", CODECS, ids=str)
def test_the_error_is_independent_of_the_values(setting):
    """Nearest rounding to 2 bits makes values smaller: their error follows them. Dithered error does not."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for kind in (x, x.abs(), x.relu(), x.sign() * 0.3):
        error = send(setting, kind, step=3) - kind
        spread = error.std() * 4 / math.sqrt(error.numel())
        assert error.mean().abs() <= spread
        size = kind.square().mean().sqrt()
        assert (error * kind / size).mean().abs() <= spread * 1.5


def test_the_two_sides_need_the_same_context():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(send(CODECS[0], x, step=3), send(CODECS[0], x, step=4))
