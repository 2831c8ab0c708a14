import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels import backends, native
from ds_compress.kernels.backends import reference
from ds_compress.kernels.topk import cpu as selection
from ds_compress.kernels.topk import index_coding as coding
from ds_compress.kernels.topk.selection import Selection
from tests.support.kernels import EACH_TARGET, compiled_for


@st.composite
def subsets(draw):
    """(ascending distinct indices, numel), from none to all of the entries."""
    numel = draw(st.integers(0, 400))
    seed = draw(st.integers(0, 2**16))
    count = draw(st.integers(0, numel))
    chosen = np.random.default_rng(seed).choice(numel, count, replace=False) if numel else []
    return torch.tensor(np.sort(chosen), dtype=torch.int64), numel


def coded(name, indices, numel):
    """The parts of `indices`; what they are decoded to has to be equal."""
    coder, count = coding.CODERS[name], indices.numel()
    parts = coder.encode(Selection.at(indices, numel))
    assert tuple((tuple(p.shape), p.dtype) for p in parts) == coder.layout(numel, count)
    assert sum(p.nbytes for p in parts) == coding.nbytes(name, numel, count)
    decoded = coder.decode(parts, numel, count).indices
    assert decoded.dtype == torch.int64 and torch.equal(decoded, indices)
    return parts


@EACH_TARGET
@pytest.mark.parametrize("name", coding.CODERS)
@settings(deadline=None, max_examples=60)
@given(subsets())
def test_decode_returns_what_encode_was_given_whatever_the_backend(target, name, subset):
    with compiled_for(target):
        parts = coded(name, *subset)
    with backends.using(reference):
        assert all(map(torch.equal, parts, coded(name, *subset)))


@pytest.mark.parametrize("name", ["int16", "int32"])
def test_entries_from_2_31_on_arrive(name):
    """A message of 4 GiB in bf16 has them; in int32 they came back negative."""
    coded(name, torch.tensor([5, 2**31 - 1, 2**31, 2**31 + 77]), 2**31 + 78)


def test_the_bitmask_is_little_endian():
    (packed,) = coding.Bitmask.encode(Selection.at(torch.tensor([0, 3, 9]), 11))
    assert packed.tolist() == [0b00001001, 0b00000010]


def test_the_smallest_coder_follows_the_density():
    assert coding.smallest(("bitmask", "int32"), 6400, 201) == "bitmask"
    assert coding.smallest(("bitmask", "int32"), 6400, 199) == "int32"
    assert coding.smallest(tuple(coding.CODERS), 6400, 640) == "rice"
    assert coding.smallest(tuple(coding.CODERS), 6400, 6000) == "bitmask"


def test_rice_by_hand():
    """r is 1. index - i: 0 0 3 6 6 15 24 32; low bits 0 0 1 0 0 1 0 0; i + high part: 0 1 3 6 7 12 18 23."""
    planes, unary = coding.Rice.encode(Selection.at(torch.tensor([0, 1, 5, 9, 10, 20, 30, 39]), 40))
    assert planes.tolist() == [[0b00100100]]
    assert unary.tolist() == [0b11001011, 0b00010000, 0b10000100]


@pytest.mark.parametrize("density", [0.003, 0.01, 0.1, 0.3, 0.5])
def test_rice_is_within_a_tenth_of_the_information_bound(density):
    numel = 1 << 20
    count = round(density * numel)
    bound = (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)
    assert bound <= 8 * coding.nbytes("rice", numel, count) <= 1.12 * bound


@pytest.mark.parametrize("name", coding.CODERS)
@pytest.mark.parametrize("numel", [65535, 65536, 65537, 200000])
@pytest.mark.parametrize("chosen", ["first", "last", "ends", "all but one", "scattered"])
def test_extremes_of_long_tensors(name, numel, chosen):
    """The static size holds for the worst gaps, and the 16-bit offsets at and beyond their range."""
    indices = {
        "first": torch.arange(1000),
        "last": torch.arange(numel - 1000, numel),
        "ends": torch.tensor([0, numel - 1]),
        "all but one": torch.cat([torch.arange(65000), torch.arange(65001, numel)]),
        "scattered": torch.arange(3, numel, 4093),
    }[chosen]
    coded(name, indices, numel)


def test_bits_beyond_the_entries_and_beyond_the_count_are_not_listed(monkeypatch):
    """A damaged bitmask must not name entries that do not exist."""
    monkeypatch.setattr(native, "LONG", 0)
    everything = torch.full((9,), 255, dtype=torch.uint8)
    for count in (100, 5, 66):
        listed = [*range(min(count, 67)), *[0] * (count - 67)]
        assert selection.list_bits(everything, 67, count).tolist() == listed
