"""The format of kernels.entropy decoded by a program of its own; C++ against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.entropy.format import CodeLayout, frame_of
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for, remembered


def by_the_book(words, frame):
    """What the words stand for, in float64, as the docstring of `kernels.entropy` says it."""
    words = [int(word) & 0xFFFF for word in words]
    signed = [word - (word >> 15 << 16) for word in words]
    exponent, j = words[frame.head], words[frame.head + 1]
    unit, step = 2.0 ** (exponent - 127), 4 * 2 ** (-j / 64)
    reach, shift = words[frame.head + 2], signed[frame.head + 3]
    place, below, above = frame.head + 4, reach & 255, reach >> 8
    table = dict(zip([*range(-below, 0), *range(1, above + 1), "beyond"], words[place:]))
    place += len(table)
    table[0] = 4096 - sum(table.values())
    slots = [(q, i) for q in [*range(-below, above + 1), "beyond"] for i in range(table[q])]
    escapes, values = len(words), []
    for block in range(frame.blocks):
        lanes = range(block * frame.lanes, (block + 1) * frame.lanes)
        states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in lanes]
        for number in range(block * frame.length, min(frame.numel, (block + 1) * frame.length)):
            lane = number % frame.lanes
            q, offset = slots[states[lane] % 4096]
            states[lane] = table[q] * (states[lane] >> 12) + offset
            if states[lane] < 2**16:
                states[lane], place = states[lane] << 16 | words[place], place + 1
            if q == "beyond":
                escapes -= 1
                key = words[escapes] & 0x7FFF
                size = min(2.0 ** (key // 256 - 23) * (1 + (key % 256 + 0.5) / 256), 255 / 128)
                values.append(unit * (-size if words[escapes] >> 15 else size))
            else:
                size = min((abs(q) - shift / 1024) * step, 255 / 128)
                values.append(unit * np.sign(q) * size)
        assert set(states) == {2**16}
    assert place <= escapes
    return np.array(values)


def uneven(n, seed, spread):
    """Values of which the second half has another size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    x[n // 2 :] *= 2.0 ** (spread * torch.randn((), generator=generator))
    return x


@given(n=st.integers(1, 1500), bits=st.floats(0.1, 6), spread=st.integers(0, 6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.extended
def test_the_book_reads_what_was_written(n, bits, spread, seed):
    """No value is further off than its cell is wide, or its key says; one of the largest keys is beyond."""
    x, frame = uneven(n, seed, spread), frame_of(n, bits)
    code = reference.encode_entropy(x, frame)
    values, valid = reference.decode_entropy(code, frame, torch.float32)
    expected = by_the_book(code.tolist(), frame)
    assert valid and np.allclose(values.double().numpy(), expected, rtol=1e-5, atol=0)
    step = 2.0 ** (code[frame.head] - 127) * 4 * 2 ** (-code[frame.head + 1].item() / 64)
    assert ((values - x).abs() <= 1.01 * step + x.abs() / 250).all()


def test_a_packet_of_an_early_release_is_the_same_today():
    x = torch.tensor([0.5, -1.0, 0.25, 3.0, 0.0, -0.125, 1.5, -2.0])
    frame = frame_of(8, 6)
    code = reference.encode_entropy(x, frame)
    assert frame == CodeLayout(8, 24)
    assert code.tolist() == BEFORE


BEFORE = [-23154, 20, 0, 0, 128, 1536, 257, 0, 0, 0, 3582, 0, 0, 0, 0, 0, 0]
BEFORE += [-26880, 5760, -27904, 6016, 5120, -27136, 5376]


encode, decode = map(remembered, (reference.encode_entropy, reference.decode_entropy))
"""With the blocks and samples of the test below."""


def kinds(n):
    """Short messages of many kinds."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, generator=generator)
    few = torch.where(torch.arange(n) % 1111 < 9, x, 0)
    wide = torch.empty(n).cauchy_(generator=generator)
    return x, x.half(), wide, few, x.sign() * 0.3, x * 1e-40, 0 * x


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dither", [None, 99])
@pytest.mark.extended(keep=1)
def test_cpp_equals_the_reference(target, dither, dtype, monkeypatch):
    """In blocks of all kinds; both refuse damaged words, or decode them alike. Also where a step comes from a
    sample, where values are so few that it misleads."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 2000)
    monkeypatch.setattr("ds_compress.kernels.entropy.format.SAMPLED_NUMEL", 20_000)
    rng = np.random.default_rng(0)
    messages = [uneven(n, seed, spread=3) for seed, n in enumerate((300, 5000, 20_007, 30_000))]
    messages += [x for n in (1, 33, 2001) for x in kinds(n)]
    frame_of.cache_clear()
    with compiled_for(target):
        for number, x in enumerate(messages):
            x = x if x.dtype == torch.float16 else x.to(dtype)
            frame = frame_of(x.numel(), (6, 2, 2.5, 0.5, 0.3)[number % 5], dither is not None)
            code = cpu.encode_entropy(x, frame, dither)
            assert torch.equal(code, encode(x, frame, dither))
            for damage in range(8 if number < 4 else 2):
                words = code.clone()
                if damage:
                    span = frame.tables + 40 if damage % 2 else frame.words
                    place = rng.integers(frame.head if damage % 3 else 0, min(span, len(words)))
                    words[place] ^= int(rng.integers(1, 1 << 14))
                ours, theirs = (each(words, frame, dtype, dither) for each in (cpu.decode_entropy, decode))
                assert_same_bits(ours, theirs)
                assert damage or ours[1]
    frame_of.cache_clear()


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_inf_and_nan_are_alike(rounding):
    """Packets do not depend on how a processor finds the larger of two numbers of which one is nan."""
    x, frame = torch.randn(4096), frame_of(4096, 2, rounding == "dither")
    codes = []
    for special in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        wild = x.clone()
        wild[[5, 1000]] = special
        codes.append(cpu.encode_entropy(wild, frame, 7 if frame.dithered else None))
    assert all(torch.equal(code, codes[0]) for code in codes)


def test_cpp_samples_the_runs_of_the_reference():
    """The first step of a large dithered message comes from a sample: all backends must take the same
    runs."""
    for numel in ((1 << 18) + 37, 300_001):
        x, frame = torch.randn(numel), frame_of(numel, 2, dithered=True)
        assert frame.is_sampled
        assert_same_bits(cpu.encode_entropy(x, frame, 7), reference.encode_entropy(x, frame, 7))
