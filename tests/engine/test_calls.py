"""How many Python calls of ours a message costs, on real ranks, and a codec for one long tensor."""

import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ds_compress
from ds_compress.codec import Context, TensorSpec
from ds_compress.codec import build as build_codec
from tests.support.pipeline import MICRO_BATCH, WIDTH, batches, build, ds_config
from tests.support.ranks import run_ranks

OURS = str(Path(ds_compress.__file__).parent)
QUANTIZE = {direction: {"codec": {"name": "quantize", "bits": 4}} for direction in ("forward", "backward")}
LENGTH = 512
MOST = 24
MOST_FILES = 14
KINDS = {"run_pass": "sent", "run_send": "sent", "run_receive": "received"}
"""What functions are there for, with all that they call; an eager message leaves when it is computed."""


@contextmanager
def profiled(look):
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


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

    with profiled(count):
        engine.train_batch(data)
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


def calls(function):
    """What `function` returns, and how many functions of ours it calls."""
    found = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    with profiled(count):
        return function(), found


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def calls_of(codec, x):
    """Those of encoding into a packet, and of decoding."""
    spec, ctx = TensorSpec.of(x), Context()
    codec.decode(codec.encode(x, ctx), spec, Context())  # compiles, and remembers the shape
    memory = codec.encode(x, ctx)
    parts, encoding = calls(lambda: codec.encode(x, ctx, memory))
    return encoding, calls(lambda: codec.decode(parts, spec, ctx))[1]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "choice",
    [{}, {"bits": 5, "scheme": "symmetric", "scale_dtype": "fp32"}, {"group_size": 64, "hadamard": True}],
    ids=str,
)
def test_quantize_calls_three(choice):
    """Codec, backend, and the call of C++, which checks its arguments. It was 23 and 20, then 6."""
    encoding, decoding = calls_of(build_codec({"name": "quantize", **choice}), torch.randn(4, 256, 512))
    assert encoding.total() <= 3 and decoding.total() <= 3, (encoding, decoding)


@NEEDS_COMPILER
def test_topk_calls_fifteen():
    """Codec, selection, backend, index coding, the cast of values, C++. It was 27 and 29."""
    encoding, decoding = calls_of(build_codec("topk"), torch.randn(4, 256, 512))
    assert encoding.total() <= 15 and decoding.total() <= 15, (encoding, decoding)
