"""How many functions of ours a codec calls for one long tensor: each costs what a thousand entries cost."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import ds_compress
from ds_compress import build
from ds_compress.codec import Context, TensorSpec

OURS = str(Path(ds_compress.__file__).parent)


def calls(function):
    """What `function` returns, and the calls of functions of ours by name."""
    found = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        return function(), found
    finally:
        sys.setprofile(None)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "choice",
    [{}, {"bits": 5, "scheme": "symmetric", "scale_dtype": "fp32"}, {"group_size": 64, "hadamard": True}],
    ids=str,
)
def test_quantize_calls_six(choice):
    """Codec, groups, backend, whether C++ serves, its arguments, its checks. It was 23 and 20."""
    codec, x = build({"name": "quantize", **choice}), torch.randn(4, 256, 512)
    spec = TensorSpec.of(x)
    codec.decode(codec.encode(x, Context()), spec, Context())  # compiles, and remembers the shape
    ctx = Context()
    memory = codec.encode(x, ctx)  # a packet has it
    parts, encoding = calls(lambda: codec.encode(x, ctx, memory))
    _, decoding = calls(lambda: codec.decode(parts, spec, ctx))
    assert encoding.total() <= 6 and decoding.total() <= 6, (encoding, decoding)
