"""Subtractive dither: the error of a message does not depend on its values, and its mean is 0."""

import hashlib
import math

import pytest
import torch

from ds_compress.kernels.entropy import cpu
from ds_compress.kernels.entropy.format import LARGEST_Q, frame_of
from ds_compress.kernels.entropy.reference import decode_entropy, encode_entropy
from ds_compress.kernels.quantize.grid import draws_in_order
from tests.support.codecs import roundtrip

CODECS = [
    {"name": "entropy", "bits": 2},
    {"name": "quantize", "bits": 2, "hadamard": True},
    {"name": "quantize", "bits": 3, "group_size": 64},
]


@pytest.mark.parametrize("setting", CODECS, ids=str)
def test_the_error_is_independent_of_the_values(setting):
    """Nearest rounding to 2 bits makes values smaller: their error follows them. Dithered error does not."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for kind in (x, x.abs(), x.relu(), x.sign() * 0.3):
        error = roundtrip({**setting, "rounding": "dither"}, kind, step=3) - kind
        spread = error.std() * 4 / math.sqrt(error.numel())
        assert error.mean().abs() <= spread
        size = kind.square().mean().sqrt()
        assert (error * kind / size).mean().abs() <= spread * 1.5


@pytest.mark.parametrize("bits", [1.0, 2.0, 5.0])
def test_equals_rounding_with_a_draw_that_is_subtracted(bits):
    """As q = round(x / step + u), decoded to (q - u) step; u is the same today."""
    n, key = 5000, 0x123456789ABCDEF0
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    frame = frame_of(n, bits, dithered=True)
    words, _ = encode_entropy(x, frame, key)
    values, valid = decode_entropy(words, frame, torch.float32, key)
    exponent, j = words[frame.head : frame.head + 2].tolist()
    step = 4 * 2 ** (-j / 64) * 2.0 ** (exponent - 127)
    drawn = draws_in_order(n, key, x.device)
    assert hashlib.blake2b(drawn.int().numpy().tobytes(), digest_size=8).hexdigest() == "96e265491811def5"
    u = (drawn.double() + 0.5) / 65536 - 0.5
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
    words, _ = encode_entropy(x, frame, 1)
    assert decode_entropy(words, frame, torch.float32, 1)[1]
    words[frame.head + 1 if place == "step" else -1] = 5 if place == "step" else LARGEST_Q + 1
    values, valid = decode_entropy(words, frame, torch.float32, 1)
    assert not valid and values.isnan().all()


@pytest.mark.parametrize("bits, step", [(1.5, 1.6723), (2, 1.1317), (3, 0.55587), (4, 0.28094)])
def test_packets_are_within_3_percent_of_an_ideal_code(bits, step):
    """Which has `step` at `bits` / 1.03 for a standard normal value, given its draw: by the density of the
    value and a uniform part of a step (Zamir and Feder 1992). Head, tables, spare words and what four classes
    leave out, all included. With more words to spare, 1.5 bits were 3.5 % above."""
    n = 1 << 19
    frame = frame_of(n, bits, dithered=True)
    words, _ = cpu.encode_entropy(torch.randn(n, generator=torch.Generator().manual_seed(0)), frame, 7)
    exponent, j = words[frame.head : frame.head + 2].tolist()
    assert 4 * 2 ** (exponent - 127 - j / 64) <= step
