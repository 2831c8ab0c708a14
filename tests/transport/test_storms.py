"""Numbers that are not finite: seen by every stage, and over when their cause is."""

import math

import pytest

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks

BLOCKS = {
    "topk": {"forward": {"codec": "topk"}, "backward": {"codec": {"name": "topk", "indices": "reuse"}}},
    "quantize": {"forward": {"codec": {"name": "quantize", "bits": 4}}, "backward": {"codec": "quantize"}},
    "ef21": {direction: {"codec": "topk", "feedback": "ef21"} for direction in ("forward", "backward")},
}


def storm(block):
    """Train and evaluate: calm, one bad number in an input, calm again; return losses and weights."""
    engine = build(3, ds_config({**block, "min_numel": 0}))
    engine.optimizer.step = lambda *args, **kwargs: None  # as a loss scaler does that sees an overflow
    data, losses = batches(), []
    for bad in (None, math.nan, math.inf, None):
        spoilt = [next(data) for _ in range(4)]
        if bad:
            spoilt[2][0][1, 3, 5] = bad
        losses.append((engine.train_batch(iter(spoilt)).item(), engine.eval_batch(iter(spoilt)).item()))
    return losses


@pytest.mark.parametrize("name, depth", [(name, 1) for name in BLOCKS] + [("ef21", 3)])
def test_storms_are_seen_and_pass(name, depth):
    for losses in run_ranks(3, storm, {**BLOCKS[name], "link": {"depth": depth}}):
        finite = [(math.isfinite(trained), math.isfinite(evaluated)) for trained, evaluated in losses]
        assert finite == [(True, True), (False, False), (False, False), (True, True)], losses
