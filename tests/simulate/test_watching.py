"""What is asked of simulated boundaries, and said to them: equal to what a pipeline counts and knows."""

import itertools
import math

import pytest
import torch
from torch import nn

import ds_compress  # noqa: F401
from ds_compress.errors import CompressionError
from ds_compress.simulate import announce, evaluating, simulate, traffic
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    batches,
    build,
    ds_config,
    even_cuts,
    layers,
    simulated,
    train_step,
)
from tests.support.ranks import run_ranks

TOPK = {"name": "topk", "density": 0.2}
QUANTIZE = {"name": "quantize", "bits": 4, "group_size": 32}
BLOCK = {
    "forward": {"codec": TOPK, "feedback": {"name": "aqsgd", "ids": {"column": 2}}},
    "backward": {"codec": QUANTIZE, "feedback": "ef"},
    "min_numel": 0,
}
SAMPLES = 8  # of the data: every second micro-batch is of samples seen before


def with_ids():
    """Micro-batches (input, target, index): other inputs at each visit."""
    places = itertools.cycle(torch.arange(SAMPLES).split(MICRO_BATCH))
    for (x, target), ids in zip(batches(), places):
        yield x, target, ids


def counted(stages, config, steps):
    """Losses, and by boundary and direction the bytes this rank sent."""
    engine, data = build(stages, config), with_ids()
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    sent = {
        (channel.boundary.number, channel.direction): (channel.sent.raw_bytes, channel.sent.wire_bytes)
        for channel in engine.ds_compress.stage.sending
    }
    return losses, sent


def test_bytes_and_samples_are_those_of_a_pipeline():
    """The ids of samples were refused from a column; warm-up and first visits are counted."""
    config = ds_config({**BLOCK, "warmup_steps": 1})
    ranks = run_ranks(4, counted, 4, config, 4)
    model, data = simulated(layers(), config, even_cuts(8, 4)), with_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert [train_step(model, optimizer, data) for _ in range(4)] == ranks[0][0]
    found = {(row.boundary, row.direction): (row.raw_bytes, row.wire_bytes) for row in traffic(model)}
    assert found == {place: sizes for _, sent in ranks for place, sizes in sent.items()}
    assert all(row.messages == 4 * MICRO_BATCHES for row in traffic(model))


def test_errors_are_those_of_what_arrives():
    block = {**BLOCK, "forward": {"codec": TOPK}, "tensors": [0]}  # no parameter comes before the boundary
    model = simulate(nn.Sequential(nn.Identity(), nn.Identity()), ds_config(block), [1])
    assert all(math.isnan(row.relative_error) for row in traffic(model)), "nothing was sent"
    errors = []
    for seed in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        arrived = model(x)
        errors.append((x - arrived).norm().item() / x.norm().item())
        arrived.sum().backward()
    forward, backward = traffic(model)
    assert forward.relative_error == pytest.approx(sum(errors) / 3, rel=1e-6)
    assert backward.relative_error == pytest.approx(0, abs=0.2)
    model(torch.zeros(4, 64))
    assert traffic(model)[0].relative_error == pytest.approx(sum(errors) / 4, rel=1e-6), (
        "nothing lost of zeros"
    )
    model(torch.full((4, 64), torch.inf))
    assert math.isnan(traffic(model)[0].relative_error)


def test_epochs_are_so_many_steps():
    """`warmup_epochs` was refused; the pipeline equals `warmup_steps` (test_engine.py)."""

    def losses(block, **options):
        model = simulated(layers(), ds_config({**BLOCK, **block}), [4], **options)
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), with_ids()
        return [train_step(model, optimizer, data) for _ in range(6)]

    epochs = losses({"warmup_epochs": 2}, steps_per_epoch=2)
    assert epochs == losses({"warmup_steps": 4})
    assert epochs != losses({"warmup_steps": 3})
    with pytest.raises(CompressionError, match=r"warmup_epochs: 2 is not allowed where the length"):
        losses({"warmup_epochs": 2})


@pytest.mark.parametrize("setting", ["compressed", "uncompressed"])
def test_one_state_is_evaluated_both_ways(setting):
    def trained(**block):
        model, data = simulated(layers(), ds_config({**BLOCK, **block}), [4]), with_ids()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, lambda: train_step(model, optimizer, data)

    (both, step), (one, other_step) = trained(), trained(eval=setting)
    x, _ = next(batches(replica=3))
    results = {}
    for messages in ("compressed", "uncompressed"):
        assert step() == other_step()
        both[0].eval()
        with torch.no_grad(), evaluating(both, messages):
            assert not any(module.training for module in both.modules())
            results[messages] = both(x)
        assert [layer.training for layer in both] == [False] + [True] * 8
    with torch.no_grad():
        one.eval()
        assert torch.equal(one(x), results["uncompressed"]) == (setting == "uncompressed")
        with evaluating(both, "compressed"):
            assert torch.equal(both(x), one(x)) == (setting == "compressed")
    assert step() == other_step()


def test_there_are_two_ways_to_evaluate():
    with pytest.raises(CompressionError, match="messages 'on'; allowed: 'compressed', 'uncompressed'"):
        evaluating(nn.Identity(), "on").__enter__()


def test_samples_must_be_announced_anew():
    model = simulated(layers(), ds_config(BLOCK), [4])
    x, target, ids = next(with_ids())
    announce(model, (x, target, ids))
    model(x)
    for _ in range(2 * MICRO_BATCHES):
        with pytest.raises(CompressionError, match="boundary 0: the samples of this training pass"):
            model(x)
    with pytest.raises(CompressionError, match=r"aqsgd.ids.column: 2 of the data should hold integers"):
        announce(model, (x, target))
    with torch.no_grad():
        model.eval()(x)  # needs none


def test_what_a_pipeline_warns_of_is_warned_of(caplog):
    """A collapsing run gave no warning: LoCo beside 2 bits had a backward error of 3,089."""
    config = ds_config(
        {
            "forward": {"codec": QUANTIZE},
            "backward": {"codec": {"name": "topk", "density": 0.02}},
            "guard": {"every": 2},
            "warmup_steps": 1,
            "min_numel": 0,
        }
    )
    model, data = simulated(layers(), config, [4]), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lines = []
    with caplog.at_level("WARNING", "ds_compress"):
        for _ in range(5):
            train_step(model, optimizer, data)
            lines.append([record.getMessage() for record in caplog.records])
    assert lines[1] == [], "no step of the guard"
    assert len(lines[2]) == 1 and lines[2] == lines[4], "once"
    assert lines[2][0].startswith("boundary 0, backward: topk(density=0.02) has an error of accumulated")
