"""Gradients between replicas leave during the last backward pass, and the results are the same."""

import pytest
from deepspeed.pipe import LayerSpec
from torch.utils.checkpoint import checkpoint

from tests.support.pipeline import Block, batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.replicas import Alternating, digest

WIDTH = 192
"""Matrices of 295 kB: three in a bucket of 1 MB."""


class Recomputed(Block):
    """Runs twice; each run is recomputed in a backward pass of its own."""

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


KINDS = {
    "usual": [Block] * 4,
    "no gradient in some steps": [Alternating, Block, Alternating, Block],
    "recomputed": [Block, Block, Block, Recomputed],
    "frozen later": [Block] * 4,
}


def steps(stages, config, layers, freezes):
    """Digests of the weights after each step, and the buckets that had left before DeepSpeed's reduction."""
    engine = build(stages, config, [LayerSpec(layer, WIDTH) for layer in layers])
    early, started = engine.ds_compress.gradients.early, []
    if early is not None:
        finish = early.finish
        early.finish = lambda: started.append(early.started) or finish()
    data = batches(engine.grid.get_data_parallel_id(), shape=(8, WIDTH))
    digests = []
    for step in range(4):
        if step == 2 and freezes:
            engine.module.forward_funcs[0].up.weight.requires_grad = False
        engine.train_batch(data)
        digests.append(digest(engine))
    return digests, started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 2), (1, 3)])
@pytest.mark.extended(keep=2)
def test_overlap_changes_nothing_but_the_time(kind, stages, replicas):
    block = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", "bucket_mb": 1}
    results = {}
    for overlap in (True, False):
        config = ds_config({"replicas": {**block, "overlap": overlap}}, replicas=replicas)
        results[overlap] = run_ranks(
            stages * replicas, steps, stages, config, KINDS[kind], kind == "frozen later"
        )
    assert [digests for digests, _ in results[True]] == [digests for digests, _ in results[False]]
    started = [found for _, found in results[True]]
    buckets = 3 if stages == 1 else 2
    expected = {
        "usual": [0, buckets, buckets, buckets],  # the first step shows how often a pass gives a gradient
        "recomputed": [0] * 4,
    }
    own = started[-1]  # a replica of the last stage
    if kind in expected:
        assert own == expected[kind]
    else:
        assert own[0] == 0 and min(own[1:]) < max(own[1:])
