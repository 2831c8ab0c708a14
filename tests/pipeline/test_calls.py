"""How many Python calls of ours a message costs, counted on real ranks; messages are long enough for C++."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import ds_compress
from tests.support.dist import run_ranks
from tests.support.pipeline import MICRO_BATCH, WIDTH, batches, build, ds_config

OURS = str(Path(ds_compress.__file__).parent)
QUANTIZE = {direction: {"codec": {"name": "quantize", "bits": 4}} for direction in ("forward", "backward")}
LENGTH = 512
MOST = 50


def calls_in_a_step(engine, data):
    """Calls of functions of ours, by name."""
    found = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        engine.train_batch(data)
    finally:
        sys.setprofile(None)
    return found


def calls_per_message(block):
    """Calls that one more micro-batch adds, shared out over its message sent and its message received."""
    engine, data = build(2, ds_config(block)), batches(shape=(LENGTH, WIDTH))
    counts = []
    for micro_batches in (4, 8):
        engine.set_train_batch_size(MICRO_BATCH * micro_batches)
        for _ in range(2):  # what is made once per shape is made in the first
            engine.train_batch(data)
        counts.append(calls_in_a_step(engine, data))
    counts[1].subtract(counts[0])
    return {name: count / 8 for name, count in counts[1].items() if count}


@pytest.mark.parametrize("link", ["eager", "blocking"])
def test_calls(link):
    block = {**QUANTIZE, "min_numel": 64, "link": {"mode": link}, "monitor": {"every": 0}}
    for per_call in run_ranks(2, calls_per_message, block):
        assert sum(per_call.values()) <= MOST, per_call
