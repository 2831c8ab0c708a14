"""The passes of feedbacks in C++, on every processor, against plain torch: bit for bit."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for
from tests.support.messages import values

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@EACH_TARGET
@settings(max_examples=150, deadline=None, database=None)
@given(
    n=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    factor=st.sampled_from([1.0, 3.0, 65536.0]),
    share=st.sampled_from([0.0, 0.3, 0.8]),
    special=st.sampled_from([None, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 1000),
)
def test_equal_to_torch(target, n, dtype, factor, share, special, seed):
    x = values(17, n, dtype, seed, special)
    state = values(17, n, torch.float32, seed + 1).clamp(-1e30, 1e30)
    state[0, 0], x[0, 0] = torch.finfo(torch.float32).max / 2, -torch.finfo(dtype).max  # beyond the range
    calls = {
        "delta": (x, state, factor),
        "update_state": (state, x, factor),
        "add_residual": (x, state, factor, x.isfinite().all()),
        "update_residual": (x, state, x.flip(0).contiguous(), factor, share, 1 - share),
        "is_finite": (x,),
        "encode_int8": (state,),
    }
    with compiled_for(target):
        for name, arguments in calls.items():
            ours, theirs = (getattr(backend, name)(*arguments) for backend in (cpu, reference))
            if isinstance(ours, torch.Tensor):
                ours, theirs = (ours,), (theirs,)
            assert_same_bits(ours, theirs)
        codes, scales = reference.encode_int8(state)
        assert_same_bits([cpu.decode_int8(codes, scales)], [reference.decode_int8(codes, scales)])
