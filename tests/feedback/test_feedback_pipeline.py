"""Feedback in real pipelines: both sides in step."""

import hashlib

import pytest
import torch

import ds_compress  # noqa: F401
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks

EF21 = {"codec": {"name": "topk", "density": 0.3}, "feedback": "ef21"}


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
    block = {"forward": EF21, "backward": EF21, "min_numel": 0, "link": {"mode": link}}
    config = ds_config(block, replicas=replicas)
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
