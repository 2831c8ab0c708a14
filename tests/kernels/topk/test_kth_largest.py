"""The k largest in C++, as bits and values, and what bits hold, on every processor: as in torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.topk.cpu import first_look
from ds_compress.kernels.topk.reference import as_mask
from tests.support.codecs import assert_same_bits
from tests.support.kernels import EACH_TARGET, alike, compiled_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["normal", "tied", "not finite", "outliers", "relu", "constant", "rising"]


def rows_of(kind, rows, d, seed):
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))
    if kind == "zeros":
        x[:, seed % d :] = -0.0
    elif kind == "outliers":
        x[:, [3, 100, -1]] *= 20
    elif kind == "not finite":
        x[0, :: seed % 7 + 1], x[-1, seed % d] = torch.nan, -torch.inf
    made = {"tied": (2 * x).round(), "relu": x.relu(), "constant": torch.full_like(x, 3.0)}
    return {**made, "rising": torch.arange(float(rows * d)).view(rows, d)}.get(kind, x)


def assert_kept(x, k):
    """`exact`, also in memory that is there, and what its bits then hold."""
    chosen, _ = reference.select_largest(x, k)
    values, bits = x.flatten()[chosen], reference.pack_bits(as_mask(chosen, x.numel()))
    for backend, places in ((cpu, bits), (reference, chosen)):
        memory = torch.empty_like(values)
        for found in (backend.select_largest(x, k), backend.select_largest(x, k, memory)):
            assert_same_bits(found, [places, values])
        assert found[1] is memory
    assert_same_bits([cpu.scatter(values, bits, x.shape)], [reference.scatter(values, chosen, x.shape)])
    other = x.flip(0).contiguous()
    alike(lambda backend: backend.gather(other, bits if backend is cpu else chosen, len(values)))


@EACH_TARGET
@settings(max_examples=150, deadline=None, database=None)
@given(
    rows=st.integers(1, 5),
    d=st.integers(1, 300),
    share=st.floats(0, 1),
    kind=st.sampled_from(["normal", "tied", "zeros", "not finite"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@pytest.mark.extended(keep=1)
def test_the_largest_of_short_rows(target, rows, d, share, kind, dtype, seed):
    with compiled_for(target):
        assert_kept(rows_of(kind, rows, d, seed).to(dtype), max(1, int(share * d)))


@EACH_TARGET
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.001, 0.1, 0.6])
@pytest.mark.parametrize("kind", [*KINDS, "the sample misleads"])
def test_the_largest_of_long_rows(target, dtype, density, kind):
    d = 4099
    x, k = rows_of(kind, 2, d, 1).to(dtype), int(density * d)
    if kind == "the sample misleads":  # to a band that is far too high
        x[:, :: first_look(d, k)[0]] += 100
    with compiled_for(target):
        assert_kept(x, k)


@EACH_TARGET
def test_damaged_bits_move_what_they_can(target):
    """A packet may hold any bits: more than are sent values, or fewer."""
    x = torch.arange(1.0, 201)
    with compiled_for(target):
        for byte, count in ((255, 3), (0, 3), (1, 200)):
            bits = torch.full((25,), byte, dtype=torch.uint8)
            held = min(count, int(reference.unpack_bits(bits, 200).sum()))
            values = x[:count].contiguous()
            assert cpu.scatter(values, bits, (200,)).count_nonzero() == held
            assert cpu.gather(x, bits, count).shape == (count,)
