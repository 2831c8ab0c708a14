"""Feedback in real pipelines: equal to `simulate`, both sides in step, overflow survived."""

import hashlib

import pytest
import torch

import ds_compress  # noqa: F401
from tests.support.pipeline import batches, build, ds_config, train, train_simulated
from tests.support.ranks import run_ranks

TOPK = {"name": "topk", "density": 0.3}
QUANTIZE = {"name": "quantize", "bits": 4, "group_size": 32}


def block(feedback, codec=TOPK, **changes):
    direction = {"codec": codec, "feedback": feedback}
    return {"forward": direction, "backward": direction, "min_numel": 0, **changes}


BLOCKS = {
    "ef": block("ef"),
    "ef-reuse": block(
        {"name": "ef", "scope": "micro_batch"},
        backward={"codec": {"name": "topk", "indices": "reuse"}, "feedback": "ef"},
    ),
    "ef21": block("ef21"),
    "ef21-reuse-warmup": block(
        {"name": "ef21", "scope": "micro_batch", "dtype": "bf16"},
        warmup_steps=1,
        backward={"codec": {"name": "topk", "indices": "reuse"}, "feedback": "ef21"},
    ),
    "ef_mixed": block("ef_mixed"),
    "loco": block("loco", QUANTIZE),
}


def digests(engine, role="mirror"):
    """Hash of each boundary's state of `role`, by boundary and replica."""
    found = {}
    for boundary in engine.ds_compress.stage.boundaries:
        digest = hashlib.sha256()
        for position, memory in sorted(boundary.memory.items()):
            for key in sorted(key for key in memory if f"/{role}/" in key):
                digest.update(f"{position} {key}".encode() + memory[key].view(torch.uint8).numpy().tobytes())
        found[boundary.number, boundary.replica] = digest.hexdigest()
    return found


def train_and_digest(stages, config, steps):
    engine = build(stages, config)
    data = batches(engine.grid.get_data_parallel_id())
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    return losses, digests(engine)


def train_with_evaluation(stages, config, steps, interleaved):
    engine = build(stages, config)
    data, other = batches(), batches(replica=7)
    losses = []
    for step in range(steps):
        if interleaved and step:
            engine.eval_batch(other)
        losses.append(engine.train_batch(data).item())
    return losses


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.extended(keep=3)
def test_pipeline_equals_simulate(name, stages):
    config = ds_config(BLOCKS[name])
    real = run_ranks(stages, train, stages, config)
    assert real[0]["losses"] == train_simulated(stages, config)
    without = {**BLOCKS[name], **{d: {"codec": BLOCKS[name][d]["codec"]} for d in ("forward", "backward")}}
    assert real[0]["losses"] != train_simulated(stages, ds_config(without))


@pytest.mark.parametrize(
    "stages, replicas, link, steps",
    [
        pytest.param(2, 1, "eager", 200, marks=pytest.mark.extended),
        (4, 1, "eager", 40),
        (2, 2, "eager", 40),
        pytest.param(4, 1, "eager", 200, marks=pytest.mark.slow),
        pytest.param(2, 2, "eager", 200, marks=pytest.mark.slow),
        pytest.param(2, 1, "blocking", 200, marks=pytest.mark.slow),
        pytest.param(2, 2, "blocking", 200, marks=pytest.mark.slow),
    ],
)
def test_ef21_sides_are_equal_after_many_steps(stages, replicas, link, steps):
    config = ds_config(block("ef21", link={"mode": link}), replicas=replicas)
    ranks = run_ranks(stages * replicas, train_and_digest, stages, config, steps)
    sides = {}
    for _, found in ranks:
        for place, digest in found.items():
            sides.setdefault(place, []).append(digest)
    assert len(sides) == (stages - 1) * replicas
    for upstream, downstream in sides.values():
        assert upstream == downstream
    assert len({digest for both in sides.values() for digest in both}) == len(sides)
    assert ranks[0][0][-1] < ranks[0][0][0]


@pytest.mark.parametrize("name", ["ef", "ef21", "ef_mixed", "loco"])
@pytest.mark.extended(keep=2)
def test_evaluation_does_not_change_training(name):
    config = ds_config(BLOCKS[name])
    plain, interleaved = (run_ranks(2, train_with_evaluation, 2, config, 4, i)[0] for i in (False, True))
    assert plain == interleaved
