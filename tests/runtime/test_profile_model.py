"""A pipeline profiled in one process sends what a real one sends, for every kind of message."""

import itertools

import pytest
import torch
from deepspeed.pipe import LayerSpec

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.planning.evaluate import REPEATS
from ds_compress.runtime.profile_model import PASSES, Stages, profile_model
from tests.support.pipeline import (
    MICRO_BATCH,
    Causal,
    Masked,
    Mixed,
    Skip,
    batches,
    build,
    ds_config,
    layers,
    loss_fn,
)
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
COUNT, STAGES = 6, 3
BOUNDS = [0, 2, 4, 6]


def kind(cls):
    return [LayerSpec(cls, last=place == COUNT - 1) for place in range(COUNT)]


KINDS = {
    "tensor": lambda: layers(COUNT),
    "mixed tuple": lambda: kind(Mixed),
    "two large tensors": lambda: kind(Skip),
    "mask": lambda: kind(Masked),
    "tables": lambda: Causal.layers(COUNT),
}


def sent(name):
    """What this rank sends of a micro-batch, and which tensors carry, by boundary."""
    config = ds_config(
        {"min_numel": 0, "forward": {"codec": "bf16"}, "warmup_steps": 1, "guard": {"every": 0}},
        gradient_accumulation_steps=1,
        train_batch_size=MICRO_BATCH,
    )
    engine, found = build(STAGES, config, KINDS[name]()), {}
    for end in engine.ds_compress.stage.ends:
        if end.sends:
            end.transmit = _noting(end, found)
    engine.train_batch(batches())
    after = engine.ds_compress.stage.after
    return found, {after.number: after.dependence} if after else {}


def _noting(end, found):
    transmit = end.transmit

    def noted(tensors, message_id):
        found[message_id.boundary, message_id.direction] = [x.detach().clone() for x in tensors]
        transmit(tensors, message_id)

    return noted


def profiled(name):
    built = []
    for place, spec in enumerate(KINDS[name]()):
        torch.manual_seed(1234 + place)  # as DeepSpeed does with seed_layers
        built.append(spec.build())
    return profile_model(Stages(built, BOUNDS, CPU), loss_fn, itertools.repeat(next(batches())), CPU)


@pytest.mark.parametrize("name", KINDS)
def test_messages_are_those_of_a_pipeline(name):
    messages, dependence = {}, {}
    for found, known in run_ranks(STAGES, sent, name):
        messages |= found
        dependence |= known
    ours = profiled(name)
    assert ours.messages.keys() == messages.keys() and len(messages) == 2 * (STAGES - 1)
    for place, tensors in messages.items():
        first, *others = zip(ours.of_one_micro_batch[place], tensors, strict=True)
        assert torch.equal(*first), place
        for mine, theirs in others:
            scale = theirs.abs().max().item() if theirs.is_floating_point() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-7 * scale)
    assert dict(enumerate(ours.dependence)) == dependence


def test_every_stage_is_measured():
    ours = profiled("tensor")
    assert [len(each) for each in (ours.forward, ours.backward, ours.activation_bytes)] == [STAGES] * 3
    assert min(ours.forward + ours.backward) > 0 and ours.loss_scale == 1
    inputs = next(batches())[0].nbytes
    assert all(
        held >= 2 * inputs for held in ours.activation_bytes
    )  # what came in, and what two layers keep at least


class Counted(torch.nn.Module):
    """A layer that counts its forward passes."""

    passes = 0

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        Counted.passes += 1
        return x * self.weight


def test_each_micro_batch_passes_once():
    layers = [Counted() for _ in range(4)]
    found = profile_model(Stages(layers, 2, CPU), loss_fn, batches(), CPU)
    assert Counted.passes == 4 * (1 + PASSES)
    for own in found.messages.values():  # of those that are kept none is another one
        assert len(own) == REPEATS and len({each[0].sum().item() for each in own.values()}) == REPEATS


def test_gradients_in_fp16_are_scaled_until_they_are_finite():
    """Without a scale small gradients vanish in fp16, and with too large a one they overflow."""

    def ours(factor):
        stages = Stages([torch.nn.Linear(32, 32) for _ in range(2)], 2, CPU, torch.float16)
        x = torch.ones(4, 32, dtype=torch.float16)
        return profile_model(
            stages, lambda y, labels: factor * y.float().mean(), itertools.repeat((x, x)), CPU
        )

    small, large = ours(1e-7), ours(100.0)
    assert small.loss_scale == 2.0**16 and 1 <= large.loss_scale < 2.0**16
    for found in (small, large):
        messages = [each for own in found.messages.values() for each in own.values()]
        assert all(torch.isfinite(x).all() and x.any() for each in messages for x in each)
