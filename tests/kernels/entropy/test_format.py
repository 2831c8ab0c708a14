"""The format of kernels.entropy: packets stay what they were; C++ against the reference."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.entropy.format import LARGEST_NUMEL, CodeLayout, frame_of, tables
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, compiled_for, remembered


def uneven(n, seed, spread):
    """Values of which the second half has another size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    x[n // 2 :] *= 2.0 ** (spread * torch.randn((), generator=generator))
    return x


@given(n=st.integers(1, 1500), bits=st.floats(0.1, 6), spread=st.integers(0, 6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.extended
def test_no_value_is_further_off_than_its_cell_is_wide(n, bits, spread, seed):
    """Or its key says; one of the largest keys is beyond."""
    x, frame = uneven(n, seed, spread), frame_of(n, bits)
    code, _ = reference.encode_entropy(x, frame)
    values, valid = reference.decode_entropy(code, frame, torch.float32)
    assert valid
    step = 2.0 ** (code[frame.head] - 127) * 4 * 2 ** (-code[frame.head + 1].item() / 64)
    assert ((values - x).abs() <= 1.01 * step + x.abs() / 250).all()


def test_a_packet_of_an_early_release_is_the_same_today():
    x = torch.tensor([0.5, -1.0, 0.25, 3.0, 0.0, -0.125, 1.5, -2.0])
    frame = frame_of(8, 6)
    code, _ = reference.encode_entropy(x, frame)
    assert frame == CodeLayout(8, 24)
    assert code.tolist() == BEFORE


BEFORE = [-23154, 20, 0, 0, 128, 1536, 257, 0, 0, 0, 3582, 0, 0, 0, 0, 0, 0]
BEFORE += [-26880, 5760, -27904, 6016, 5120, -27136, 5376]


@pytest.mark.parametrize(
    "bits, digest", [(0.5, "7f50362ae824d5f0"), (2.5, "6349eb73d4c0d7bd"), (6, "12e02a2a8c950d79")]
)
def test_long_packets_are_the_same_today_and_decoded_to_the_same(bits, digest, monkeypatch):
    """In several blocks, with values beyond the table, of numbers that every processor makes alike."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 2000)
    frame_of.cache_clear()
    numbers = torch.arange(30_000) * 0x9E3779B1 % 2**32
    x = sum(numbers >> shift & 255 for shift in (0, 8, 16, 24)).sub(510).float()
    x[::997] *= 1000
    x[20_000:] /= 32
    frame = frame_of(len(x), bits)
    code, _ = reference.encode_entropy(x, frame)
    values, valid = reference.decode_entropy(code, frame, torch.float32)
    frame_of.cache_clear()
    assert valid
    found = hashlib.blake2b(code.numpy().tobytes() + values.numpy().tobytes(), digest_size=8).hexdigest()
    assert found == digest


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
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 500)
    monkeypatch.setattr("ds_compress.kernels.entropy.format.SAMPLED_NUMEL", 2000)
    rng = np.random.default_rng(0)
    messages = [uneven(n, seed, spread=3) for seed, n in enumerate((300, 600, 5007, 12_000, 2100))]
    messages += [x for n in (1, 33, 501) for x in kinds(n)]
    frame_of.cache_clear()
    with compiled_for(target):
        for number, x in enumerate(messages):
            x = x if x.dtype == torch.float16 else x.to(dtype)
            frame = frame_of(x.numel(), (0.5, 2, 6, 3, 2, 0.3, 2.5)[number % 7], dither is not None)
            code, _ = cpu.encode_entropy(x, frame, dither)
            assert torch.equal(code, encode(x, frame, dither)[0])
            for damage in range(8 if number < 3 else 2):
                words = code.clone()
                if damage:
                    span = frame.tables + 40 if damage % 2 else frame.words
                    place = rng.integers(frame.head if damage % 3 else 0, min(span, len(words)))
                    words[place] ^= int(rng.integers(1, 1 << 14))
                ours, theirs = (each(words, frame, dtype, dither) for each in (cpu.decode_entropy, decode))
                assert_same_bits(ours, theirs)
                assert damage or ours[1]
    frame_of.cache_clear()


@pytest.mark.parametrize("dither", [None, 99])
def test_a_gpu_without_triton_codes_as_a_cpu_does(dither, monkeypatch):
    """The loops of the reference run in numpy on the CPU, elsewhere in PyTorch. Also where the last block is
    not full, and for a damaged size of a block."""
    monkeypatch.setattr("ds_compress.kernels.entropy.format._BLOCK", 500)
    frame_of.cache_clear()
    x, frame = uneven(9_001, 0, spread=3), frame_of(9_001, 2, dither is not None)
    code, _ = reference.encode_entropy(x, frame, dither)
    damaged = code.clone()
    damaged[frame.head - 2] += 3
    decoded = [reference.decode_entropy(words, frame, torch.float32, dither) for words in (code, damaged)]
    assert frame.blocks > 1 and frame.numel % frame.length and decoded[0][1] and not decoded[1][1]
    monkeypatch.setattr("ds_compress.kernels.entropy.rans._array_library", lambda tensor: torch)
    assert torch.equal(reference.encode_entropy(x, frame, dither)[0], code)
    for words, expected in zip((code, damaged), decoded):
        assert_same_bits(reference.decode_entropy(words, frame, torch.float32, dither), expected)
    frame_of.cache_clear()


class LargestFrame(CodeLayout):
    """Of a short message, whose sums have the units of the longest one."""

    unit_shift = CodeLayout(LARGEST_NUMEL, 0).unit_shift


@pytest.mark.parametrize("dither", [None, 99])
def test_a_message_of_more_than_2_28_values_fits(dither):
    """65,536 tokens of width 8,192 were refused: sums in units of 2^-32 would not fit in 64 bits."""
    for numel in (1, 2**28, 2**28 + 1, 2**29 + 7, LARGEST_NUMEL):
        constants = tables(torch.device("cpu"), CodeLayout(numel, 0).unit_shift)
        assert numel * max(constants.weight[-1].item(), constants.units[0].item()) < 2**63
        assert numel > 2**28 or torch.equal(constants.weight, tables(torch.device("cpu")).weight)
    x, frame = uneven(30_000, 0, spread=3), frame_of(30_000, 3, dither is not None)
    coarse = LargestFrame(frame.numel, frame.words, frame.dithered)
    code, exact = (cpu.encode_entropy(x, each, dither)[0] for each in (coarse, frame))
    assert torch.equal(code, reference.encode_entropy(x, coarse, dither)[0])
    assert (code[frame.head + 1] - exact[frame.head + 1]).abs() <= 1  # the step, a 64th of an octave


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_inf_and_nan_are_alike(rounding):
    """Packets do not depend on how a processor finds the larger of two numbers of which one is nan."""
    x, frame = torch.randn(4096), frame_of(4096, 2, rounding == "dither")
    codes = []
    for special in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        wild = x.clone()
        wild[[5, 1000]] = special
        codes.append(cpu.encode_entropy(wild, frame, 7 if frame.dithered else None)[0])
    assert all(torch.equal(code, codes[0]) for code in codes)


def test_cpp_samples_the_runs_of_the_reference():
    """The first step of a large dithered message comes from a sample: all backends must take the same
    runs."""
    for numel in ((1 << 18) + 37, 300_001):
        x, frame = torch.randn(numel), frame_of(numel, 2, dithered=True)
        assert frame.is_sampled
        assert_same_bits(cpu.encode_entropy(x, frame, 7), reference.encode_entropy(x, frame, 7))
