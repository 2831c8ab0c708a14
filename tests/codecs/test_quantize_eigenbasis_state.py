"""What codec quantize with "rotate": "learned" keeps: checkpoints, evaluation, feedbacks."""

import pytest
import torch

from ds_compress.codec import build
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from tests.support.codecs import AQPair, Pair, ids, observed, relative_error, send
from tests.support.messages import drifting, with_spectrum

CHOICE = {"name": "quantize", "bits": 2, "rotate": "learned"}


def test_entries_of_a_checkpoint_are_checked():
    codec, x = build(CHOICE), torch.randn(64, 16)
    ctx, _ = observed(codec, x)
    codec.check_memory(ctx.memory)
    codec.encode(x, ctx)
    codec.check_memory(ctx.memory)
    basis, levels = (f"quantize.0.forward.16.{what}" for what in ("basis", "levels"))
    good = dict(ctx.memory)
    for key, value in (
        (basis, torch.eye(16).double()),
        (basis, torch.eye(8)),
        (levels, torch.zeros(16)),
        (levels, torch.zeros(8, dtype=torch.int32)),
    ):
        with pytest.raises(CompressionError, match=key):
            codec.check_memory({**good, key: value})
    with pytest.raises(CompressionError, match="came without 'quantize.0.forward.16.levels'"):
        codec.check_memory({basis: good[basis]})
    codec.check_memory({**good, "forward/sender/ef": torch.zeros(3)})


def test_evaluation_leaves_no_trace():
    codec = build(CHOICE)
    sender, receiver = observed(codec, drifting(0))
    send(codec, drifting(1), sender, receiver)
    before = dict(sender.memory)
    for side in (sender, receiver):
        side.training = False
    send(codec, drifting(9), sender, receiver)
    assert sender.memory == before


def test_nothing_changes_over_many_messages():
    """Neither basis nor bits, nor what is kept beside them; the plan of a shape is made once."""
    codec = build(CHOICE)
    sender, receiver = observed(codec, drifting(0))
    send(codec, drifting(0), sender, receiver)
    before = dict(sender.memory)
    for step in range(1, 200):
        sender.step = receiver.step = step
        x = drifting(step % 5)[: 512 - 64 * (step % 2)]
        assert relative_error(send(codec, x, sender, receiver), x) < 0.35
    for side in (sender, receiver):
        assert side.memory.keys() == before.keys()
        assert all(torch.equal(side.memory[key], value) for key, value in before.items())
    assert [len(plans) for plans in codec._plans.values()] == [2, 2]


def test_ef21_sends_what_changes():
    """In the directions that have bits; of messages that change little it loses less than the codec."""
    pair, codec = Pair(CHOICE, "ef21"), build(CHOICE)
    x, noise = with_spectrum(0.9, 512, 32).split(256)
    pair.observe(x)
    sides = observed(codec, x)
    for step in range(1, 12):
        message = x + 0.1 * step * noise
        error = relative_error(pair(message, step=step), message)
        assert error < 0.5 * relative_error(send(codec, message, *sides), message)


def test_buffers_of_samples_stay_the_same_on_both_sides():
    pair = AQPair(CHOICE, {"name": "aqsgd", "ids": {"column": 2}})
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    pair.observe(x, sample_ids=ids(3, 7))
    for step in range(1, 6):
        pair(x + 0.1 * step, step=step, sample_ids=ids(3, 7))
        assert pair.in_step()


@pytest.mark.parametrize("feedback", ["ef", "loco", "ef_mixed"])
def test_what_is_never_sent_would_grow(feedback):
    with pytest.raises(CompressionError, match="is no contraction"):
        Config({"forward": {"codec": CHOICE, "feedback": feedback}, "warmup_steps": 1})
