"""Passes that do a feedback's steps too change nothing: not a byte that is sent, or kept."""

import shutil

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels import native
from tests.support.codecs import assert_same_bits

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
    {"bits": 1, "grid": "gaussian"},
    {"bits": 3, "hadamard": True},
    {"group_size": "tensor"},
    {"bits": 2, "grid": "gaussian"},
    {"rounding": "stochastic"},
    {"scale_dtype": "fp32"},
]


def messages(codec, shape, dtype, loss_scale):
    """What crosses in four messages, and what both sides keep at the end."""
    sender, receiver = {}, {}
    for step in range(4):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
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
    fused, in_steps = (FEEDBACKS.build(feedback, "feedback").wrap(codec) for _ in range(2))
    in_steps._fused = None
    assert fused._fused is codec
    for loss_scale in (1.0, 1000.0):
        assert_same_bits(*(list(messages(each, shape, dtype, loss_scale)) for each in (fused, in_steps)))


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_who_holds_a_copy_of_the_memory_keeps_what_was_there(feedback, monkeypatch):
    """The next state reuses the memory of the old one, unless another trial of settings holds it too."""
    monkeypatch.setattr(native, "LONG", 0)
    codec = FEEDBACKS.build(feedback, "feedback").wrap(build("quantize"))
    sender, receiver = {}, {}
    for step in range(3):
        x = torch.randn((64, 128), generator=torch.Generator().manual_seed(step))
        aside = dict(sender), dict(receiver)
        before = [{key: value.clone() for key, value in memory.items()} for memory in aside]
        parts = codec.encode(x, Context(step=step, memory=sender))
        arrived = codec.decode(parts, TensorSpec.of(x), Context(step=step, memory=receiver))
        for memory, old in zip(aside, before):
            assert memory.keys() == old.keys()
            assert_same_bits(memory.values(), old.values())
        again = codec.encode(x, Context(step=step, memory=aside[0]))
        assert_same_bits(again, parts)
        delivered = codec.decode(parts, TensorSpec.of(x), Context(step=step, memory=aside[1]))
        assert_same_bits([delivered, *aside[0].values()], [arrived, *sender.values()])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_state_that_nobody_else_holds_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(native, "LONG", 0)
    codec, memory = FEEDBACKS.build("ef", "feedback").wrap(build("quantize")), {}
    places = set()
    for _ in range(4):
        codec.encode(torch.randn(64, 128), Context(memory=memory))
        places.add(memory["forward/sender/ef"].data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("long", [0, 1 << 62], ids=["C++", "torch"])
@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_messages_that_are_not_contiguous(feedback, long, monkeypatch):
    """ef21 took them for rows where C++ does not serve."""
    monkeypatch.setattr(native, "LONG", long)
    codec = FEEDBACKS.build(feedback, "feedback").wrap(build("quantize"))
    turned, plain = {}, {}
    for step in range(3):
        x = torch.randn((16, 8, 256), generator=torch.Generator().manual_seed(step)).transpose(0, 1)
        parts = codec.encode(x, Context(step=step, memory=turned))
        assert_same_bits(parts, codec.encode(x.contiguous(), Context(step=step, memory=plain)))
        assert_same_bits(turned.values(), plain.values())
