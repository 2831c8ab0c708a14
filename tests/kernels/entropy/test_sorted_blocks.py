"""Entropy coding of sorted blocks: the format read by a program of its own, and C++ against the reference."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.entropy.format import CLASSES, RUN, SortedBlocks, frame_of
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for, remembered


def framed(n, bits, units):
    return frame_of(n, bits, units=units)


def sized(n, units, seed, spread=3.0):
    """[n]: units of very different sizes, some of equal size, some zero; heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(units.count, generator=generator)).round(decimals=1)
    x = torch.randn(n, generator=generator) * torch.exp2(torch.randn(n, generator=generator))
    whole = x[: units.count * units.size]
    whole *= sizes.repeat(units.size) if units.columns else sizes.repeat_interleave(units.size)
    return x


def numbers_of(units):
    """[count, size]: where the values of each unit are."""
    numbers = np.arange(units.count * units.size)
    return numbers.reshape(units.size, -1).T if units.columns else numbers.reshape(-1, units.size)


@given(
    count=st.integers(CLASSES, 60),
    size=st.integers(1, 40),
    columns=st.booleans(),
    rest=st.integers(0, 63),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.extended
def test_the_book_finds_every_value(count, size, columns, rest, seed):
    """What is behind the code says which units come first, and the largest do."""
    units = SortedBlocks(count, size if columns else RUN, columns)
    n = units.count * units.size + rest
    x, frame = sized(n, units, seed), framed(n, 6, units)
    words = reference.encode_entropy(x, frame)
    assert len(words) == frame.all_words == frame.words + units.words
    packed = [int(word) & 0xFFFF for word in words[frame.words :]]
    classes = np.array([packed[unit // 8] >> unit % 8 * 2 & 3 for unit in range(count)])
    assert np.bincount(classes, minlength=CLASSES).tolist() == [
        -(-count * (its + 1) // CLASSES) - -(-count * its // CLASSES) for its in range(CLASSES)
    ]
    largest = np.abs(x.numpy()[numbers_of(units)]).max(1)
    for its in range(1, CLASSES):  # but for what 7 digits do not tell
        assert largest[classes == its].max() <= largest[classes == its - 1].min() * (1 + 2**-7)
    order = [unit for its in range(CLASSES) for unit in np.flatnonzero(classes == its)]
    places = np.concatenate([numbers_of(units)[order].reshape(-1), np.arange(n - rest, n)])
    plain, valid = reference.decode_entropy(words[: frame.words], replace(frame, units=None), torch.float32)
    expected = torch.empty(n)
    expected[torch.from_numpy(places)] = plain
    values, also_valid = reference.decode_entropy(words, frame, torch.float32)
    assert valid and also_valid and torch.equal(values, expected)


SHAPES = [
    *(SortedBlocks(count, RUN, columns=False) for count in (4, 65, 130)),
    # columns, and values of each, that are no multiples of what is turned, read or coded at once
    *(SortedBlocks(*shape, columns=True) for shape in ((4, 333), (37, 33), (73, 130), (300, 41), (64, 256))),
]


encode, decode = map(remembered, (reference.encode_entropy, reference.decode_entropy))
"""With the blocks of the test below."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.extended(keep=1)
def test_cpp_equals_the_reference(target, dtype, monkeypatch):
    """Tails, cut contexts, all lanes, several blocks, inf and nan; both refuse or decode damage alike."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 400)
    monkeypatch.setattr("ds_compress.kernels.entropy.format._SHARE", 16)
    frame_of.cache_clear()
    rng = np.random.default_rng(0)
    with compiled_for(target):
        for seed, units in enumerate(SHAPES):
            n = units.count * units.size + (0 if units.columns else 17 * seed)
            for special, bits in ((None, 0.5), (None, 2.5), (torch.nan, 3), (-torch.inf, 3)):
                x, frame = sized(n, units, seed).to(dtype), framed(n, bits, units)
                if special is not None:
                    x[[7, n // 2]] = special
                words = cpu.encode_entropy(x, frame)
                assert torch.equal(words, encode(x, frame))
                for damage in range(3 if special is None else 1):
                    came = words.clone()
                    if damage:
                        place = rng.integers(*((0, frame.words), (frame.words, len(words)))[damage % 2])
                        came[place] ^= int(rng.integers(1, 1 << 14))
                    ours, theirs = (f(came, frame, dtype) for f in (cpu.decode_entropy, decode))
                    assert_same_bits(ours, theirs)
                    assert ours[1] or damage == 2
        assert frame.lanes == 32 and frame.blocks > 4 and frame.contexts == CLASSES
    frame_of.cache_clear()


@pytest.mark.parametrize("columns", [False, True])
def test_inf_and_nan_are_of_one_size(columns):
    """Packets do not depend on how a processor finds the larger of two numbers of which one is nan."""
    units = SortedBlocks(64, RUN, columns)
    x, frame = sized(units.count * RUN, units, 0), framed(units.count * RUN, 2, units)
    codes = []
    for special in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        wild = x.clone()
        wild[[5, 1000]] = special
        codes.append(cpu.encode_entropy(wild, frame))
    assert all(torch.equal(code, codes[0]) for code in codes)
