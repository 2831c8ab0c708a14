"""Low-rank gradients between replicas: an all-reduce of factors, with the same result on all of them."""

import itertools

import pytest
import torch
from torch import nn

from ds_compress.codec import CODECS
from ds_compress.config.replicas import ReplicasOptions, build_replica_codec
from ds_compress.feedback.state import residuals
from ds_compress.replicas.factors import build_exchange, compressed_parameters
from ds_compress.replicas.slices import Gradient
from ds_compress.replicas.transfers import Replicas
from ds_compress.simulate import SimulatedReplicas
from tests.replicas.test_gradients import skipped_step
from tests.simulate.test_replicas import assert_simulated_weights, distance_from_optimum
from tests.support.pipeline import ds_config
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import KINDS, assert_alike, run_replicas, train_replicas

SHAPES = (192, 96), (201, 97), (64, 3, 10, 10)


def block(rank=4, dtype="fp32", feedback="ef", **options):
    codec = {"name": "lowrank", "rank": rank, "dtype": dtype}
    return {"replicas": {"codec": codec, "feedback": feedback, **options}}


def averages(feedback, dtype, rank_of_mean, steps, autocast=False):
    """What the replicas put in, what came out, and the residuals left; with `autocast`, in a program that
    trains within it."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options = ReplicasOptions(**block(dtype=dtype, feedback=feedback)["replicas"])
    codec = build_replica_codec(options, "x")
    found = compressed_parameters([torch.empty(shape) for shape in SHAPES], codec)
    replicas = Replicas(size, rank, [torch.distributed.group.WORLD])
    exchange = build_exchange(replicas, codec, found, 1, 1234)
    everywhere, own = torch.Generator().manual_seed(9), torch.Generator().manual_seed(rank)
    given, came = [], []
    for step in range(steps):
        gradients = []
        for number, shape in enumerate(SHAPES):
            n, h = shape[0], torch.Size(shape[1:]).numel()
            r = rank_of_mean or h
            left, right = (torch.randn(length, r, generator=everywhere) for length in (n, h))
            apart = torch.randn(n, h, generator=own) if rank_of_mean is None else torch.zeros(n, h)
            value = (1 + rank) * 64 * (left @ right.T + apart) * 10 ** (step % 3)
            gradients.append(Gradient(number, value.view(-1)))
        given.append([values.clone() for _, values, *_ in gradients])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            exchange.average(gradients, 1 / size, 64.0, step)
        came.append([values for _, values, *_ in gradients])
    memories = [exchange.slices.of(gradient)[0].memory for gradient in gradients]
    left = [64 * next(residuals(memory, "backward"), torch.zeros(1)) for memory in memories]
    return {"given": given, "came": came, "left": left, "sent": exchange.sent}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_mean_of_low_rank_arrives_whole(replicas):
    results = run_ranks(replicas, averages, "none", "fp32", 4, 2)
    for step in range(2):
        for number in range(len(SHAPES)):
            exact = sum(each["given"][step][number].double() for each in results) / replicas
            for each in results:
                found = each["came"][step][number]
                assert torch.equal(found, results[0]["came"][step][number])
                assert (found - exact).norm() < 1e-5 * exact.norm()
    values = sum(torch.Size(shape).numel() for shape in SHAPES)
    factors = sum(4 * (shape[0] + torch.Size(shape[1:]).numel()) for shape in SHAPES)
    sent = results[0]["sent"]
    assert sent.raw_bytes / sent.wire_bytes == pytest.approx(values / factors, rel=1e-3)


def test_products_are_those_without_the_autocast_of_a_program():
    """They had 16 bits: averages lost 1 %, and in fp16 what is below 6e-8 or above 65,504."""
    found, expected = (
        run_ranks(2, averages, "ef", "fp32", None, 2, autocast)[0]["came"] for autocast in (True, False)
    )
    assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.extended(keep=1)
def test_nothing_is_lost(dtype, replicas):
    """I2, also with factors that are summed in bf16: residuals are taken from what came."""
    results = run_ranks(replicas, averages, "ef", dtype, None, 7)
    for number in range(len(SHAPES)):
        given = sum(own.double() for each in results for own in (g[number] for g in each["given"]))
        came = replicas * sum(found[number].double() for found in results[0]["came"])
        left = sum(each["left"][number].double().view(-1) for each in results)
        assert (came + left - given).abs().max() < 1e-5 * given.abs().max()
        assert (came - given).abs().max() > 0.1 * given.abs().max()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 zero 1"])
@pytest.mark.parametrize("specs", ["wide", "odd", "none", "tied"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (1, 3), (2, 2), (2, 3)])
@pytest.mark.parametrize("feedback", ["none", "ef", "loco"])
@pytest.mark.extended(keep=1)
def test_replicas_stay_alike(kind, specs, stages, replicas, feedback):
    """I1, with clipping."""
    settings = {"replicas": replicas, "gradient_clipping": 0.1, **KINDS[kind]}
    results = run_replicas(stages, replicas, ds_config(block(feedback=feedback), **settings), 4, specs)
    assert_alike(results)
    assert all(4 * each["sent"] < each["raw"] for each in results)


@pytest.mark.parametrize("kind", ["fp32 zero 1", "bf16 accumulation", "fp16 zero 1"])
@pytest.mark.extended(keep=1)
def test_partitions_that_cut_matrices_are_refused(kind):
    for line in run_ranks(2, refusal, train_replicas, 1, ds_config(block(), replicas=2, **KINDS[kind])):
        assert "replicas.codec: 'lowrank' is not allowed with DeepSpeedZeroOptimizer" in line
        assert "train without ZeRO" in line


def test_a_skipped_step_leaves_q_and_residuals_as_they_were():
    for skipped, before, after in run_ranks(2, skipped_step, ds_config(block(), replicas=2, **KINDS["bf16"])):
        assert skipped == 1 and all(len(memory) == 2 for memory in before)
        for old, new in zip(before, after, strict=True):
            assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)


def test_inf_of_one_replica_reaches_all_and_is_forgotten():
    model = nn.Linear(192, 96, bias=False)
    replicas = SimulatedReplicas(model, {"ds_compress": block()}, 2)
    for step in range(3):
        for rank in range(2):
            model.weight.grad = torch.randn(96, 192)
            if step == 1 and rank == 1:
                model.weight.grad[3, 4] = torch.inf
            replicas.collect()
        replicas.average()
        assert model.weight.grad.isfinite().all() if step != 1 else not model.weight.grad.isfinite().any()


@pytest.mark.extended
def test_error_feedback_reaches_the_optimum():
    """The mean is a matrix of full rank, 32 times the rank that is sent; the start of each step is warm."""
    apart = torch.randn(128, 160, generator=torch.Generator().manual_seed(1))
    assert distance_from_optimum(block()["replicas"], apart, 1000, 0.05) < 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.extended(keep=1)
def test_weights_are_those_of_simulated_replicas(dtype):
    config = ds_config(block(dtype=dtype), replicas=2)
    real = run_replicas(1, 2, config, 4)[0]["weights"]
    assert_simulated_weights(config, real, 4)


def test_matrices_that_factors_would_not_make_smaller_stay_exact():
    codec = CODECS.build({"name": "lowrank", "rank": 100}, "codec")
    assert list(compressed_parameters([torch.empty(128, 160), torch.empty(400, 400)], codec)) == [1]
