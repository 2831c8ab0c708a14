import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels import indices as coding


@st.composite
def subsets(draw):
    """(ascending distinct indices, numel), from none to all of the entries."""
    numel = draw(st.integers(0, 400))
    seed = draw(st.integers(0, 2**16))
    count = draw(st.integers(0, numel))
    chosen = np.random.default_rng(seed).choice(numel, count, replace=False) if numel else []
    return torch.tensor(np.sort(chosen), dtype=torch.int64), numel


@pytest.mark.parametrize("name", coding.CODERS)
@settings(deadline=None, max_examples=60)
@given(subsets())
def test_decode_returns_what_encode_was_given_in_the_declared_layout(name, subset):
    indices, numel = subset
    coder = coding.CODERS[name]
    parts = coder.encode(indices, numel)
    assert tuple((tuple(p.shape), p.dtype) for p in parts) == coder.layout(numel, indices.numel())
    assert sum(p.nbytes for p in parts) == coding.nbytes(name, numel, indices.numel())
    decoded = coder.decode(parts, numel, indices.numel())
    assert decoded.dtype == torch.int64
    assert decoded.tolist() == indices.tolist()


def test_the_bitmask_is_little_endian():
    (packed,) = coding.Bitmask.encode(torch.tensor([0, 3, 9]), 11)
    assert packed.tolist() == [0b00001001, 0b00000010]


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=70))
def test_packed_bits_come_back(bits):
    packed = coding.pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.numel() == (len(bits) + 7) // 8
    assert coding.unpack_bits(packed, len(bits)).tolist() == bits


def test_auto_takes_the_bitmask_above_one_in_32():
    assert coding.smallest(("bitmask", "int32"), 6400, 201) == "bitmask"
    assert coding.smallest(("bitmask", "int32"), 6400, 199) == "int32"
