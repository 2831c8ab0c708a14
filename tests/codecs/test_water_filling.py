"""Bits by water-filling, and what codec quantize loses with them, against a reference in numpy."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import build
from ds_compress.codecs.eigenbasis import MOST_BITS, allocate_bits, levels_of
from ds_compress.kernels.quantize import gaussian
from tests.support.codecs import observed, relative_error, send
from tests.support.messages import with_spectrum

TABLES = {bits: np.array(gaussian.levels(bits)) for bits in range(1, 5)}
"""Levels above 0; test_gaussian.py has them from Lloyd and Max."""


def mean_error(bits):
    """Of values of variance 1."""
    if bits == 0:
        return 1.0
    if bits > 4:
        return mean_error(4) / 4 ** (bits - 4)
    x = np.linspace(0, 8, 80001)
    weight = np.exp(-(x**2) / 2)
    nearest = TABLES[bits][np.abs(x[:, None] - TABLES[bits]).argmin(1)]
    return (weight * (x - nearest) ** 2).sum() / weight.sum()


ERRORS = [mean_error(bits) for bits in range(MOST_BITS + 1)]


def water_filled(variances, bits):
    """How many bits each of `variances` gets, one at a time."""
    widths = [0] * len(variances)
    heap = [(-v * (ERRORS[0] - ERRORS[1]), place) for place, v in enumerate(variances)]
    heapq.heapify(heap)
    for _ in range(bits * len(variances)):
        _, place = heapq.heappop(heap)
        widths[place] += 1
        if widths[place] < MOST_BITS:
            worth = variances[place] * (ERRORS[widths[place]] - ERRORS[widths[place] + 1])
            heapq.heappush(heap, (-worth, place))
    return widths


def on_grid(groups, bits):
    """[k, size] on grids of least squared error up to 4 bits, else on uniform ones."""
    if bits == 0:
        return np.zeros_like(groups)
    if bits > 4:
        step = np.abs(groups).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        return np.round(groups / step) * step
    table = np.concatenate([-TABLES[bits][::-1], TABLES[bits]])
    unit = np.sqrt((groups**2).mean(1, keepdims=True))
    level = table[np.abs((groups / unit)[..., None] - table).argmin(-1)]
    return level * ((groups * level).sum(1) / (level**2).sum(1))[:, None]


def expected_error(warmup, x, bits, size):
    variances, vectors = np.linalg.eigh(warmup.T @ warmup)
    order = variances.argsort()[::-1]
    widths = water_filled(variances[order].clip(0), bits)
    coefficients = (x @ vectors[:, order]).T
    sent = [
        on_grid(values.reshape(-1, size), width).reshape(-1) for values, width in zip(coefficients, widths)
    ]
    return np.linalg.norm(coefficients - np.stack(sent)) / np.linalg.norm(x)


@settings(max_examples=40, deadline=None)
@given(
    h=st.integers(1, 40),
    size=st.sampled_from([32, 128]),
    decay=st.sampled_from([0.7, 0.9, 0.97]),
    bits=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_loses_what_the_reference_loses(h, size, decay, bits, seed):
    warmup, x = with_spectrum(decay, 4096, h, seed).split(2048)
    options = {"group_size": size, "scale_dtype": "fp32"}
    codec = build({"name": "quantize", "bits": bits, "rotate": "learned", **options})
    error = relative_error(send(codec, x, *observed(codec, warmup)), x)
    expected = expected_error(warmup.double().numpy(), x.double().numpy(), bits, size)
    # two offers that are a quarter of an octave apart may count as one
    assert error == pytest.approx(expected, rel=0.1, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(variances=st.lists(st.floats(1e-6, 1), min_size=1, max_size=60), bits=st.integers(1, MOST_BITS))
def test_bits_are_shared_out_as_one_at_a_time(variances, bits):
    """On average exactly, the larger variance never fewer; one may go where it is worth nearly as much."""
    variances = np.sort(variances)[::-1].copy()
    counts = allocate_bits(levels_of(torch.from_numpy(variances)), bits)
    widths = [sum(place < count for count in counts) for place in range(len(variances))]
    assert sum(widths) == bits * len(variances) and list(counts) == sorted(counts, reverse=True)
    lost, least = (
        sum(v * ERRORS[width] for v, width in zip(variances, each))
        for each in (widths, water_filled(variances, bits))
    )
    assert lost <= 1.15 * least


def test_equal_variances_share_alike_whatever_the_last_bits():
    """The first ones get what is left over, not those that are larger by chance."""
    noise = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for variances in (torch.ones(60).double(), torch.tensor([1.0] * 20 + [0.25] * 20 + [0.0] * 20).double()):
        expected = allocate_bits(levels_of(variances), 3)
        moved = (variances * (1 + 1e-13 * noise) + 1e-15 * noise).clamp(min=-1)
        assert allocate_bits(levels_of(moved), 3) == expected
