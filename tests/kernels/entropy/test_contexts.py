"""The format of kernels.entropy decoded by a program of its own; C++ against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.entropy.format import CLASSES, MOST_CONTEXTS, RUN, CodeLayout, SortedBlocks, frame_of
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for, remembered


def by_the_book(words, frame):
    """What the words stand for, in float64, as the docstring of `kernels.entropy` says it."""
    words = [int(word) & 0xFFFF for word in words]
    signed = [word - (word >> 15 << 16) for word in words]
    exponent, j = words[frame.head], words[frame.head + 1]
    unit, step = 2.0 ** (exponent - 127), 4 * 2 ** (-j / 64)
    place, contexts = frame.head + 2 + 2 * frame.contexts, []
    for context in range(frame.contexts):
        reach, shift = words[frame.head + 2 + 2 * context], signed[frame.head + 3 + 2 * context]
        below, above = reach & 255, reach >> 8
        table = dict(zip([*range(-below, 0), *range(1, above + 1), "beyond"], words[place:]))
        place += len(table)
        table[0] = 4096 - sum(table.values())
        slots = [(q, i) for q in [*range(-below, above + 1), "beyond"] for i in range(table[q])]
        contexts.append((slots, table, shift))
    escapes, values = len(words), []
    for block in range(frame.blocks):
        lanes = range(block * frame.lanes, (block + 1) * frame.lanes)
        states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in lanes]
        for number in range(block * frame.length, min(frame.numel, (block + 1) * frame.length)):
            context = sum(number >= end for end in frame.ends)
            slots, table, shift = contexts[context]
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


def mixed(n, cuts, seed, spread):
    """Values of another size in each context."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    for cut in cuts:
        x[cut:] *= 2.0 ** (spread * torch.randn((), generator=generator))
    return x


@given(
    n=st.integers(1, 1500),
    bits=st.floats(0.1, 6),
    places=st.lists(st.floats(0, 0.999), max_size=MOST_CONTEXTS + 2),
    spread=st.integers(0, 6),
    seed=st.integers(0, 99),
)
@example(
    n=291, bits=1.0, places=[0.5, 0.5, 0.25, 0.0, 0.0, 0.5, 0.0], spread=2, seed=7
)  # the largest is beyond
@settings(max_examples=40, deadline=None)
@pytest.mark.extended
def test_the_book_reads_what_was_written(n, bits, places, spread, seed):
    """No value is further off than its cell is wide, or its key says; one of the largest keys is beyond."""
    cuts = tuple(int(place * n) for place in places)
    x, frame = mixed(n, cuts, seed, spread), frame_of(n, bits, cuts)
    assert 1 <= frame.contexts <= min(MOST_CONTEXTS, 1 + len(cuts))
    code = reference.encode_entropy(x, frame)
    values, valid = reference.decode_entropy(code, frame, torch.float32)
    expected = by_the_book(code.tolist(), frame)
    assert valid and np.allclose(values.double().numpy(), expected, rtol=1e-5, atol=0)
    step = 2.0 ** (code[frame.head] - 127) * 4 * 2 ** (-code[frame.head + 1].item() / 64)
    assert ((values - x).abs() <= 1.01 * step + x.abs() / 250).all()


def test_contexts_are_worth_their_tables():
    """Half of the values are 16 times larger: 2 bits more for each of them, 2 less for the others."""
    n, cuts = 1 << 16, (1 << 15,)
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[1 << 15 :] /= 16
    errors = []
    for frame in (frame_of(n, 2.5), frame_of(n, 2.5, cuts)):
        values, _ = cpu.decode_entropy(cpu.encode_entropy(x, frame), frame, torch.float32)
        errors.append(((values - x).norm() / x.norm()).item())
    # the one step of both is set by the large ones: 0.87 bits each would be saved by an ideal coder
    assert errors[1] < 0.75 * errors[0]


def test_one_context_is_the_format_without_them():
    """A code that was made before there were contexts."""
    x = torch.tensor([0.5, -1.0, 0.25, 3.0, 0.0, -0.125, 1.5, -2.0])
    frame = frame_of(8, 6)
    code = reference.encode_entropy(x, frame)
    assert frame == CodeLayout(8, 24) and frame.contexts == 1
    assert code.tolist() == BEFORE


BEFORE = [-23154, 20, 0, 0, 128, 1536, 257, 0, 0, 0, 3582, 0, 0, 0, 0, 0, 0]
BEFORE += [-26880, 5760, -27904, 6016, 5120, -27136, 5376]


def test_contexts_are_left_out_where_words_are_few():
    """Those that matter least first; there is always room for tables that make all values 0."""
    octaves = tuple(1024 << place for place in range(11))[::-1]
    assert frame_of(4_096_000, 2.5, octaves).ends == (*reversed(octaves), 4_096_000)
    assert frame_of(4_096_000, 2.5, octaves * 2).contexts == 12
    assert frame_of(10_000, 1, (5000, 2500, 1250)).ends == (5000, 10_000)
    for n in (1, 31, 100, 1000, 10_000, 100_000):
        frame = frame_of(n, 0.1, tuple(n * place // 20 for place in range(20)))
        assert frame.capacity >= 2 * frame.contexts and frame.words >= 256 * (frame.contexts - 1)
        assert all(end % frame.lanes == 0 for end in frame.ends[:-1]) and frame.ends[-1] == n


encode, decode = map(remembered, (reference.encode_entropy, reference.decode_entropy))
"""With the blocks of the test below."""


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.extended
def test_cpp_equals_the_reference(target, dtype, monkeypatch):
    """Contexts begin inside blocks and span blocks; both refuse damaged words, or decode them alike."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 2000)
    rng = np.random.default_rng(0)
    frame_of.cache_clear()
    with compiled_for(target):
        for seed, (n, bits) in enumerate([(300, 6), (5000, 2), (20_007, 2.5), (30_000, 0.5)]):
            cuts = tuple(sorted(rng.integers(0, n, 9).tolist(), reverse=True))
            x, frame = mixed(n, cuts, seed, spread=3).to(dtype), frame_of(n, bits, cuts)
            code = cpu.encode_entropy(x, frame)
            assert torch.equal(code, encode(x, frame))
            for damage in range(8):
                words = code.clone()
                if damage:
                    span = frame.tables + 40 * frame.contexts if damage % 2 else frame.words
                    place = rng.integers(frame.head if damage % 3 else 0, span)
                    words[place] ^= int(rng.integers(1, 1 << 14))
                ours, theirs = (each(words, frame, dtype) for each in (cpu.decode_entropy, decode))
                assert_same_bits(ours, theirs)
                assert damage or ours[1]
    frame_of.cache_clear()


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
    x, frame = sized(n, units, seed), frame_of(n, 6, units=units)
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


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.extended(keep=1)
def test_cpp_equals_the_reference_on_sorted_blocks(target, dtype, monkeypatch):
    """Tails, cut contexts, all lanes, several blocks, inf and nan; both refuse or decode damage alike."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 400)
    monkeypatch.setattr("ds_compress.kernels.entropy.format._SHARE", 16)
    frame_of.cache_clear()
    rng = np.random.default_rng(0)
    with compiled_for(target):
        for seed, units in enumerate(SHAPES):
            n = units.count * units.size + (0 if units.columns else 17 * seed)
            for special, bits in ((None, 0.5), (None, 2.5), (torch.nan, 3), (-torch.inf, 3)):
                x, frame = sized(n, units, seed).to(dtype), frame_of(n, bits, units=units)
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
    x, frame = sized(units.count * RUN, units, 0), frame_of(units.count * RUN, 2, units=units)
    codes = []
    for special in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        wild = x.clone()
        wild[[5, 1000]] = special
        codes.append(cpu.encode_entropy(wild, frame))
    assert all(torch.equal(code, codes[0]) for code in codes)


@pytest.mark.parametrize(
    ("numel", "cuts", "units"),
    [
        ((1 << 18) + 37, (), None),
        (300_001, (90_000, 200_000, 250_000), None),
        ((1 << 18) + 37, (), SortedBlocks(4096, 64, False)),
        (263 * 1000, (), SortedBlocks(263, 1000, True)),
        (97 * 2731 + 13, (), SortedBlocks(97, 2731, True)),
        (40 * 7001, (), SortedBlocks(7001, 40, True)),
    ],
    ids=["runs", "contexts", "rows", "columns", "columns with a rest", "short columns"],
)
def test_cpp_samples_the_runs_of_the_reference(numel, cuts, units):
    """The first step of a large dithered message comes from a sample, copied in the order of the tensor: all
    backends must take the same runs, and count each value in the context that it is coded in."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    if units is not None and units.columns:
        x[: units.numel] *= torch.randn(units.count, generator=generator).exp().repeat(units.size)
    frame = frame_of(numel, 2, cuts, dithered=True, units=units)
    assert frame.is_sampled
    assert_same_bits(cpu.encode_entropy(x, frame, 7), reference.encode_entropy(x, frame, 7))
