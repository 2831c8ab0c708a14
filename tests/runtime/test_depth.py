"""`link.depth`: more micro-batches under way, and not one number that differs."""

import itertools
from dataclasses import replace

import pytest
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.pipeline import Block, alike
from tests.support.pipeline_kinds import KINDS, different, train_all
from tests.support.ranks import run_ranks

MICRO_BATCHES = 9  # enough for 1F1B at depth 3 and two stages
FAST = ("tensor", "mixed-dynamic", "tied", "zero-1", "bf16")
COUNTED = ("reset", "depth", "depth-data-parallel")  # its shapes change every 4; run by test_kinds


def at_depths(recipes, *depths):
    each = itertools.product(recipes, depths)
    return {f"{name} {depth}": {**recipes[name], "link": {"depth": depth}} for name, depth in each}


NONE = at_depths({"none": {}}, 1, 2, 3)
WITH_STATE = {
    "ef": alike({"name": "topk", "density": 0.2}, "ef"),
    "ef21": alike({"name": "quantize", "bits": 2}, {"name": "ef21", "scope": "micro_batch"}),
    "stochastic": alike({"name": "quantize", "bits": 2, "rounding": "stochastic"}),
    "aqsgd": {"forward": {"codec": "quantize", "feedback": {"name": "aqsgd", "ids": "hash"}}},
    "lowrank": alike({"name": "lowrank", "rank": 4}),
    "entropy": alike({"name": "entropy", "rounding": "dither"}, warmup_steps=1),
    "lossless": alike("lossless"),
}


def each_kind(*fast):
    """The kinds of pipeline, `fast` ones first; others are slow."""
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in fast)
    return [*fast, *slow]


def check(name, blocks, **changes):
    kind = replace(KINDS[name], **changes)
    if not kind.possible():
        pytest.skip("DeepSpeed itself cannot do this here")
    if name not in COUNTED:
        kind = replace(kind, config={**kind.config, "micro_batches": MICRO_BATCHES})
    for runs in run_ranks(kind.world_size, train_all, kind, blocks):
        for block in blocks:
            recipe, _ = block.split()
            reference = runs["stock" if kind.stock and recipe == "none" else f"{recipe} 1"]
            assert not different(runs[block], reference), block


@pytest.mark.parametrize("name", each_kind(*FAST))
@pytest.mark.extended(keep=1)
def test_none_equals_stock(name):
    check(name, NONE)


@pytest.mark.extended
def test_state_of_codecs_and_feedbacks_does_not_depend_on_the_depth():
    """It follows the messages of one direction, and these keep their order."""
    check("tensor", at_depths(WITH_STATE, 1, 3))


class Dropped(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


@pytest.mark.extended
def test_dropout_draws_the_same_numbers():
    check("tensor", NONE, specs=lambda: [LayerSpec(Dropped)] * 6)
