"""Passes that do a feedback's steps too change nothing: not a byte that is sent, or kept."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels import native
from tests.support.same_bits import assert_same_bits

FEEDBACK = [
    "ef",
    {"name": "ef", "decay": 0.5, "dtype": "bf16"},
    {"name": "ef", "dtype": "int8"},
    "ef21",
    {"name": "ef21", "dtype": "bf16"},
    {"name": "loco", "reset_every": 3},
    {"name": "loco", "beta": 0.0, "dtype": "fp32"},
]
OPTIONS = [
    {"bits": 4},
    {"bits": 8, "scheme": "symmetric", "group_size": 64},
    {"bits": 1, "scheme": "symmetric"},
    {"bits": 3, "hadamard": True},
    {"group_size": "tensor"},
    {"group_size": "channel"},
    {"axis": 0, "group_size": 32},
    {"bits": 2, "grid": "gaussian"},
    {"rounding": "stochastic"},
    {"scale_dtype": "fp32"},
    {"group_size": 32, "mixed": {"share": 0.5, "low_bits": 2}},
]


def messages(codec, shape, dtype, loss_scale):
    """What crosses in four messages, one of them not finite, and what both sides keep at the end."""
    sender, receiver = {}, {}
    for step in range(4):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        x.view(-1)[5] = float("inf") if step == 1 else 1.0
        place = {"step": step, "loss_scale": loss_scale}
        parts = codec.encode(x, Context(**place, memory=sender))
        yield from parts
        yield codec.decode(parts, TensorSpec.of(x), Context(**place, memory=receiver))
    for memory in (sender, receiver):
        yield from memory.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("feedback", FEEDBACK, ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 37), (64, 96)], ids=str)
def test_passes_of_a_codec_change_nothing(feedback, options, dtype, shape, monkeypatch):
    monkeypatch.setattr(native, "LONG", 0)
    codec = build({"name": "quantize", **options})
    fused, in_steps = (FEEDBACKS.build(feedback, "feedback").around(codec) for _ in range(2))
    in_steps._fused = None
    assert fused._fused is codec
    for loss_scale in (1.0, 1000.0):
        assert_same_bits(*(list(messages(each, shape, dtype, loss_scale)) for each in (fused, in_steps)))
