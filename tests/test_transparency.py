"""The thesis: with codec "none" losses and weights are bit-equal to stock DeepSpeed."""

import pytest

from tests.support.pipeline import ds_config, same_weights, train
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("link", ["blocking", "eager"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stages", [2, 4])
def test_none_equals_stock(stages, bf16, link):
    changes = {"bf16": {"enabled": True}} if bf16 else {}
    block = {"link": {"mode": link}, "min_numel": 0}
    stock = run_ranks(stages, train, stages, ds_config(**changes))
    for mine, theirs in zip(run_ranks(stages, train, stages, ds_config(block, **changes)), stock):
        assert mine["class"] == "CompressedPipelineEngine" and theirs["class"] == "PipelineEngine"
        assert mine["losses"] == theirs["losses"]
        assert same_weights(mine["weights"], theirs["weights"])
    assert len(set(stock[0]["losses"])) == 4 and stock[0]["losses"][-1] < stock[0]["losses"][0]
