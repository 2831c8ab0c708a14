"""Subtractive dither: the error of a message does not depend on its values, and its mean is 0."""

import math

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels.entropy import cpu
from ds_compress.kernels.entropy.format import LARGEST_Q, frame_of
from ds_compress.kernels.entropy.reference import decode_entropy, encode_entropy
from tests.support.codecs import Pair

CODECS = [
    {"name": "entropy", "bits": 2},
    {"name": "quantize", "bits": 2, "hadamard": True},
    {"name": "quantize", "bits": 3, "group_size": 64},
]


def send(setting, x, step):
    codec, ctx = build({**setting, "rounding": "dither"}), Context(step=step)
    return codec.decode(codec.encode(x, ctx), TensorSpec.of(x), ctx)


@pytest.mark.parametrize("setting", CODECS, ids=str)
def test_the_error_is_independent_of_the_values(setting):
    """Nearest rounding to 2 bits makes values smaller: their error follows them. Dithered error does not."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for kind in (x, x.abs(), x.relu(), x.sign() * 0.3):
        error = send(setting, kind, step=3) - kind
        spread = error.std() * 4 / math.sqrt(error.numel())
        assert error.mean().abs() <= spread
        size = kind.square().mean().sqrt()
        assert (error * kind / size).mean().abs() <= spread * 1.5


def uniform(n, key):
    """Draw as `quantize.grid` says, one value after the other, in Python's integers."""
    first, second, word = key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF

    def hashed(number):
        bits = number ^ first
        bits = ((bits ^ bits >> 17) * 0xED5AD4BB & word) ^ second
        bits = (bits ^ bits >> 11) * 0xAC4C1B51 & word
        bits = (bits ^ bits >> 15) * 0x31848BAB & word
        return bits ^ bits >> 14

    lower = hashed(64) >> 24
    for i in range(n):
        row, lane = 64 + i // 64, i % 64 // 4
        bits = hashed(lane) + (hashed(16 + lane) | 1) * hashed(row) & word
        byte = (bits ^ bits >> 16) >> i % 4 * 8 & 255
        yield (byte * 256 + lower + 0.5) / 65536 - 0.5


@pytest.mark.parametrize("bits", [1.0, 2.0, 5.0])
def test_equals_rounding_with_a_draw_that_is_subtracted(bits):
    """By an independent computation: q = round(x / step + u), decoded (q - u) step."""
    n, key = 5000, 0x123456789ABCDEF0
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    frame = frame_of(n, bits, dithered=True)
    words = encode_entropy(x, frame, key)
    values, valid = decode_entropy(words, frame, torch.float32, key)
    exponent, j = words[frame.head : frame.head + 2].tolist()
    step = 4 * 2 ** (-j / 64) * 2.0 ** (exponent - 127)
    u = torch.tensor(list(uniform(n, key)), dtype=torch.float64)
    expected = ((x / step + u).round() - u) * step
    wrong = (values.double() - expected).abs() > step * 1e-4  # where rounding to 16 digits decides
    assert valid and wrong.sum() <= 2
    error = (values.double() - x) / step
    assert error.abs().max() <= 0.5001
    assert error.square().mean().item() == pytest.approx(1 / 12, rel=0.05)


@pytest.mark.parametrize("place", ["step", "escape"])
def test_numbers_that_no_sender_writes_are_refused(place):
    n = 5000
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    x[7] = 40.0  # beyond the tables
    frame = frame_of(n, 2, dithered=True)
    words = encode_entropy(x, frame, 1)
    assert decode_entropy(words, frame, torch.float32, 1)[1]
    words[frame.head + 1 if place == "step" else -1] = 5 if place == "step" else LARGEST_Q + 1
    values, valid = decode_entropy(words, frame, torch.float32, 1)
    assert not valid and values.isnan().all()


def ideal_bits(step):
    """What an ideal coder needs for a standard normal value in steps of that size, given its draw: by the
    density of the value and a uniform part of a step (Zamir and Feder 1992)."""
    y = torch.linspace(-8 - step, 8 + step, 100_001, dtype=torch.float64)
    density = (torch.special.ndtr(y + step / 2) - torch.special.ndtr(y - step / 2)) / step
    return -torch.trapezoid(torch.special.xlogy(density, density), y).item() / math.log(2) - math.log2(step)


@pytest.mark.parametrize("bits", [1.5, 2, 3, 4])
def test_packets_are_within_3_percent_of_an_ideal_code(bits):
    """Head, tables, spare words and what four classes leave out, all included. With more words to
    spare, 1.5 bits were 3.5 % above."""
    n = 1 << 19
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    frame = frame_of(n, bits, dithered=True)
    words = cpu.encode_entropy(x, frame, 7)
    exponent, j = words[frame.head : frame.head + 2].tolist()
    assert 16 * len(words) / n <= 1.03 * ideal_bits(4 * 2 ** (exponent - 127 - j / 64))


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
@pytest.mark.parametrize("setting", CODECS[:2], ids=str)
def test_both_sides_of_a_feedback_agree(setting, feedback):
    """Receivers draw what senders drew, wherever a feedback encodes and decodes."""
    pair = Pair({**setting, "rounding": "dither"}, feedback)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    last = [(pair(x) - x).norm() / x.norm() for _ in range(4)][-1]
    assert last < 1
    for key in pair.sender.keys() & pair.receiver.keys():
        assert torch.equal(pair.sender[key], pair.receiver[key])
