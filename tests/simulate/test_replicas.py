"""Replicas in one process: the weights of real ones; how near to an optimum they come."""

import pytest
import torch
from torch import nn

from ds_compress.simulate import SimulatedReplicas
from tests.support.pipeline import MICRO_BATCHES, batches, ds_config, loss_fn, simulated
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import WIDE, train_replicas, wide_layers

STEPS = 4


def block(**changes):
    return {"replicas": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", **changes}}


@pytest.mark.parametrize("feedback", ["none", "ef", "loco"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.extended(keep=1)
def test_weights_are_those_of_real_replicas(feedback, rounding):
    codec = {"name": "quantize", "bits": 4, "rounding": rounding}
    config = ds_config(block(codec=codec, feedback=feedback, warmup_steps=1), replicas=2)
    real = run_ranks(2, train_replicas, 1, config, STEPS)[0]["weights"]
    assert_simulated_weights(config, real, STEPS)


def assert_simulated_weights(config, real, steps):
    """Train in one process what `train_replicas` trains in two; the weights have to be `real`."""
    model = simulated(wide_layers(), config, [])
    replicas = SimulatedReplicas(model, config, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [batches(replica, shape=(8, WIDE)) for replica in range(2)]
    for _ in range(steps):
        for own in data:
            for _ in range(MICRO_BATCHES):
                x, target = next(own)
                (loss_fn(model(x), target) / MICRO_BATCHES).backward()
            replicas.collect()
        replicas.average()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, real[name]), name
    assert replicas.exchanges[0].sent.wire_bytes > 0


def distance_from_optimum(replicas_block, apart, steps, lr):
    """Of the mean of two quadratics, whose optima are `apart` from it, relative to the start."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(*apart.shape[::-1], bias=False)
    nn.init.zeros_(model.weight)
    target = torch.randn(apart.shape, generator=generator)
    replicas = SimulatedReplicas(model, {"ds_compress": {"replicas": replicas_block}}, 2)
    for _ in range(steps):
        for sign in (1, -1):
            model.weight.grad = model.weight.detach() - target - sign * apart
            replicas.collect()
        replicas.average()
        with torch.no_grad():
            model.weight -= lr * model.weight.grad
        model.weight.grad = None
    return ((model.weight - target).norm() / target.norm()).item()


def test_a_replica_too_few_or_too_many_is_refused():
    replicas = SimulatedReplicas(nn.Linear(4, 4), {"ds_compress": block()}, 2)
    replicas.collect()
    assert "average() after 1 of 2 replicas" in refusal(replicas.average)
    replicas.collect()
    assert "more than 2 replicas" in refusal(replicas.collect)
