"""How many Python calls of ours a codec costs for one long tensor."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import ds_compress
from ds_compress.codec import Context, TensorSpec, build

OURS = str(Path(ds_compress.__file__).parent)


def calls(function):
    """What `function` returns, and how many functions of ours it calls."""
    found = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        return function(), found
    finally:
        sys.setprofile(None)


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
    encoding, decoding = calls_of(build({"name": "quantize", **choice}), torch.randn(4, 256, 512))
    assert encoding.total() <= 3 and decoding.total() <= 3, (encoding, decoding)


@NEEDS_COMPILER
def test_topk_calls_fifteen():
    """Codec, selection, backend, index coding, the cast of values, C++. It was 27 and 29."""
    encoding, decoding = calls_of(build("topk"), torch.randn(4, 256, 512))
    assert encoding.total() <= 15 and decoding.total() <= 15, (encoding, decoding)
