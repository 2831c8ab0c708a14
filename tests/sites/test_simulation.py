"""Outer steps of replicas in one process: all that each has learned counts once."""

import itertools

import pytest
import torch
from torch import nn

from ds_compress.sites.simulation import SimulatedRounds
from tests.support.refusals import refusal

PLAIN = {"lr": 1.0, "momentum": 0.0}


def outer_config(every=1, codec="none", feedback="none", **outer):
    replicas = {"codec": codec, "feedback": feedback, "every": every, "outer": outer}
    return {"ds_compress": {"replicas": replicas}}


def models(count, size=160):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 4)) for _ in range(count)]


def train(replicas, rounds, steps):
    """Train every replica on batches of its own with SGD; yield after each step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in replicas]
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(replicas))]
    for _ in range(steps):
        for model, optimizer, generator in zip(replicas, optimizers, generators):
            x = torch.randn(8, 160, generator=generator)
            (model(x) - x[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield
        rounds.end_step()


def test_each_replica_may_have_a_codec_of_its_own():
    """The mean of 8 bits and of none; what must be the same is named if it is not."""
    codecs = "none", {"name": "quantize", "bits": 8}
    configs = [outer_config(4, codec, delay=0, **PLAIN) for codec in codecs]
    replicas, alike = models(2), models(2)
    rounds = SimulatedRounds(replicas, configs)
    for _ in itertools.chain(train(replicas, rounds, 8), train(alike, SimulatedRounds(alike, configs[0]), 8)):
        pass
    assert rounds.codecs[1].nbytes < rounds.codecs[0].nbytes / 3
    assert 0 < (flat(replicas[0]) - flat(alike[0])).norm() < 0.01 * flat(alike[0]).norm()
    said = refusal(SimulatedRounds, models(2), [configs[0], outer_config(5, delay=0, **PLAIN)])
    assert "replicas.every: the other replicas have 4, this one has 5" in said


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_of_sgd_gives_the_mean():
    """I6."""
    replicas = models(3)
    for _ in train(replicas, SimulatedRounds(replicas, outer_config(delay=0, **PLAIN)), 5):
        wanted = torch.stack([flat(model) for model in replicas]).mean(0)
    assert all(torch.allclose(flat(model), wanted, atol=1e-6) for model in replicas)
    assert all(torch.equal(flat(model), flat(replicas[0])) for model in replicas)


@pytest.mark.parametrize("slopes", [(1.0, 3.0), (2.0,)], ids=["two replicas", "alone, as without"])
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_all_that_is_learned_counts_once(delay, slopes):
    """The gradient of each replica is constant, so what it learns between two rounds is known."""
    replicas, mean = models(len(slopes)), 4e-3 * 2
    rounds = SimulatedRounds(replicas, outer_config(every=4, delay=delay, **PLAIN))
    first = flat(replicas[0])
    for step in range(1, 4 * 5 + 1):
        for model, slope in zip(replicas, slopes):
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-3 * slope
        rounds.end_step()
        sent, applied = step // 4, max(0, step - delay) // 4
        assert torch.allclose(rounds.anchor.values, _sorted(first, replicas[0]) - sent * mean, atol=1e-5)
        for model, slope in zip(replicas, slopes):
            own = 1e-3 * slope * (step - 4 * applied)  # learned since the round that is applied
            assert torch.allclose(flat(model), first - applied * mean - own, atol=1e-5)


def _sorted(values, model):
    """`values` with the parameters that are compressed first, as in the anchor."""
    parts = values.split([p.numel() for p in model.parameters()])
    return torch.cat(sorted(parts, key=lambda part: part.numel() < 16_384))


def test_other_blocks_are_refused():
    block = {"replicas": {"codec": "quantize"}}
    assert "SimulatedRounds needs" in refusal(SimulatedRounds, models(1), {"ds_compress": block})


def test_small_matrices_are_compressed_too():
    """Those of LoRA have a few thousand values; they were sent in fp32, 8 times the bytes."""
    rounds = SimulatedRounds(models(2, size=40), outer_config(codec={"name": "quantize", "bits": 4}))
    exact = 40 + 4 + 4 * 40  # biases, and a matrix of fewer than 1,024 values
    assert rounds.codecs[0].nbytes < 4 * exact + 1600 * 5 / 8 + 200
