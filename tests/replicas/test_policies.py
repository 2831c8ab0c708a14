"""Policies of gradients between replicas: all replicas change their codec at the same step."""

import pytest
import torch
from torch import nn

from ds_compress.errors import CompressionError
from ds_compress.simulate import SimulatedReplicas
from tests.replicas.test_checkpoints import FP32, ZERO_1
from tests.support.pipeline import MICRO_BATCHES, batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.replicas import WIDE, assert_alike, digest, wide_layers

ACCORDION = {"name": "accordion", "backward": {"bits": [8, 4]}, "every": 2, "threshold": 0.5}
SLOW = {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}


def block(policy, codec="quantize", feedback="ef", **options):
    return {"replicas": {"codec": codec, "feedback": feedback, "policy": policy, **options}}


def train(engine, scales, skipped=0):
    """Train one step for each of `scales`, which targets are multiplied with; return the bits in each step, a
    hash of the weights after each, and what the policy has decided from.
    """
    exchange = engine.ds_compress.gradients.exchange
    dtype = next(engine.module.parameters()).dtype
    data = batches(engine.grid.get_data_parallel_id(), dtype, (8, WIDE))
    for _ in range(skipped * MICRO_BATCHES):
        next(data)
    options, digests = [], []
    for scale in scales:
        options.append(exchange.codec.codec.settings)
        engine.train_batch((x, scale * target) for x, target in data)
        digests.append(digest(engine))
    return {
        "bits": [each.get("bits", each.get("rank")) for each in options],
        "digests": digests,
        "stage": engine.stage_id,
        "state": engine.ds_compress.replica_policy.state(),
    }


def train_anew(stages, config, scales):
    return train(build(stages, config, wide_layers()), scales)


@pytest.mark.parametrize("changes", [{}, ZERO_1, {**ZERO_1, **FP32}], ids=["fp32", "bf16 zero", "bf16 own"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.extended(keep=2)
def test_accordion_is_mild_while_sums_of_gradients_change(stages, changes):
    """They grow in step 7: the interval that ends with step 8 differs from the one before."""
    config = ds_config(block(ACCORDION), replicas=2, **SLOW, **changes)
    results = run_ranks(2 * stages, train_anew, stages, config, [1] * 6 + [10] * 6)
    assert_alike(results)
    for each in results:
        assert each["bits"] == [8] * 4 + [4] * 4 + [8] * 2 + [4] * 2
        assert each["state"] == results[0]["state"]
        assert len(each["state"]["state"]["norms"]) == stages


def save_and_go_on(folder, config):
    engine = build(1, config, wide_layers())
    train(engine, [1] * 5)
    engine.save_checkpoint(folder)
    return train(engine, [1] * 3, skipped=5)


def resume(folder, config):
    engine = build(1, config, wide_layers())
    engine.load_checkpoint(folder)
    return train(engine, [1] * 3, skipped=5)


@pytest.mark.parametrize("codec", ["quantize", "lowrank"])
@pytest.mark.extended(keep=1)
def test_a_resumed_run_equals_one_that_went_on(codec, tmp_path):
    """Within an interval: its sum so far is in the checkpoint, and so is the rung."""
    option = {"quantize": {"bits": [8, 4]}, "lowrank": {"rank": [8, 4]}}[codec]
    config = ds_config(block({**ACCORDION, "backward": option}, codec), replicas=2, **SLOW)
    went_on = run_ranks(2, save_and_go_on, tmp_path, config)
    assert run_ranks(2, resume, tmp_path, config) == went_on
    assert went_on[0]["bits"][-1] == 4


def test_simulated_replicas_follow_the_policy():
    model, rates = nn.Linear(192, 96, bias=False), [0.1]
    with pytest.raises(CompressionError, match="'accordion' follows the learning rate"):
        SimulatedReplicas(model, {"ds_compress": block(ACCORDION)}, 2)
    replicas = SimulatedReplicas(model, {"ds_compress": block(ACCORDION)}, 2, lr=lambda: rates)
    bits = []
    for _ in range(8):
        bits.append(replicas.exchanges[1].codec.codec.settings["bits"])
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            replicas.collect()
        replicas.average()
    assert bits == [8] * 4 + [4] * 4


def test_the_strongest_rank_chooses_what_is_compressed():
    """The mildest did: matrices that rank 256 does not make smaller stayed exact at rank 32, too."""
    policy = {**ACCORDION, "backward": {"rank": [256, 32]}}
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 2048, bias=False))
    replicas = SimulatedReplicas(model, {"ds_compress": block(policy, "lowrank")}, 2, lr=lambda: [0.1])
    assert replicas.compressed == {0, 1}
