"""How many Python calls of ours a message costs, and in how many files; counted on real ranks, with messages
long enough for C++."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import ds_compress
from tests.support.pipeline import MICRO_BATCH, WIDTH, batches, build, ds_config
from tests.support.ranks import run_ranks

OURS = str(Path(ds_compress.__file__).parent)
QUANTIZE = {direction: {"codec": {"name": "quantize", "bits": 4}} for direction in ("forward", "backward")}
LENGTH = 512
MOST = 24
MOST_FILES = 14
KINDS = {"run_pass": "sent", "run_send": "sent", "run_receive": "received"}
"""What functions are there for, with all that they call; an eager message leaves when it is computed."""


def calls_in_a_step(engine, data):
    """Calls of functions of ours, by what they are for and name."""
    found, outermost = Counter(), None

    def count(frame, event, argument):
        nonlocal outermost
        name = frame.f_code.co_name
        if not frame.f_code.co_filename.startswith(OURS):
            return
        if event == "call":
            outermost = outermost or (frame if name in KINDS else None)
            kind = KINDS[outermost.f_code.co_name] if outermost else "either"
            found[kind, f"{Path(frame.f_code.co_filename).relative_to(OURS)}:{name}"] += 1
        elif event == "return" and frame is outermost:
            outermost = None

    sys.setprofile(count)
    try:
        engine.train_batch(data)
    finally:
        sys.setprofile(None)
    return found


def calls_per_message(block):
    """Return the calls added by one more micro-batch, for a message sent and one received."""
    engine, data = build(2, ds_config(block)), batches(shape=(LENGTH, WIDTH))
    counts = []
    for micro_batches in (4, 8):
        engine.set_train_batch_size(MICRO_BATCH * micro_batches)
        for _ in range(2):  # what is made once per shape is made in the first
            engine.train_batch(data)
        counts.append(calls_in_a_step(engine, data))
    counts[1].subtract(counts[0])
    return {key: count / 4 for key, count in counts[1].items() if count}


@pytest.mark.parametrize("link", ["eager", "blocking"])
def test_calls(link):
    block = {**QUANTIZE, "min_numel": 64, "link": {"mode": link}, "monitor": {"every": 0}}
    for per_message in run_ranks(2, calls_per_message, block):
        shared = sum(count for (kind, _), count in per_message.items() if kind == "either") / 2
        for wanted in ("sent", "received"):
            calls = {name: count for (kind, name), count in per_message.items() if kind == wanted}
            assert 10 < sum(calls.values()) + shared <= MOST, (wanted, shared, calls)
            files = {name.partition(":")[0] for name in calls}
            assert len(files) <= MOST_FILES, (wanted, files)
