"""Compression that makes messages larger is said at the first step, when their sizes are known."""

from tests.support.pipeline import ds_config, log_lines, train
from tests.support.ranks import run_ranks

LARGER = {"codec": {"name": "topk", "density": 0.9, "indices": "int32"}}


def warnings(block):
    lines = log_lines()
    train(3, ds_config(block), steps=2)
    return lines


def test_packets_larger_than_the_tensors():
    block = {"forward": {"codec": "bf16"}, "boundaries": {"1": {"backward": LARGER}}, "min_numel": 0}
    first, *others = run_ranks(3, warnings, block)
    assert others == [[], []]
    [line] = first
    assert line == (
        "ds_compress.boundaries.1.backward.codec: topk(density=0.9, indices=int32) makes messages larger: "
        "7,424 bytes instead of 4,096; use other options, or codec 'none'"
    )
