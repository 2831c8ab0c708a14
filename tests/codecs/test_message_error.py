"""The error of a message and that of its tokens: what one large row hides, and where arithmetic would."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.cli.bench import SINK, benchmark_tensor
from ds_compress.codecs.message_error import MessageError, measure_error
from tests.support.codecs import DTYPES


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), st.sampled_from(DTYPES), st.floats(0, 2))
def test_errors_against_their_definitions(size, dtype, noise):
    size = 1.0 if dtype == torch.float16 else size
    generator = torch.Generator().manual_seed(0)
    values, other = torch.randn(2, 4, 100, generator=generator, dtype=torch.float64)
    x, y = (size * values).to(dtype), (size * (values + noise * other)).to(dtype)
    ints = torch.arange(5)
    found = measure_error([x[:1], ints, x[1:]], [y[:1], ints, y[1:]])
    a, b = x.double() / size, y.double() / size
    rows = (a - b).norm(dim=1) / a.norm(dim=1)
    expected = (a - b).norm() / a.norm(), rows.square().mean().sqrt(), (a * b).sum() / (a.norm() * b.norm())
    values = found.relative_error, found.token_error, found.cosine
    assert values == pytest.approx([*map(float, expected)], rel=1e-4, abs=1e-5)
    assert found.message_norm == pytest.approx(size * a.norm().item(), rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_rows_count_alike_beside_a_sink(dtype):
    """SmolLM2: token 0 has norm 26,000, the median token 168, and one may be of any size: squares of the
    first are beyond fp16, those of a row of 1e-25 are 0 in fp32."""
    x = 7 * torch.randn(256, 576, dtype=torch.float64)
    x[0] *= 26_000 / x[0].norm()
    x[5] = 0.0
    if dtype != torch.float16:
        x[6] *= 1e-25
    x = x.to(dtype)
    y = x.clone()
    y[1:] *= 0.5
    found = measure_error([x], [y])
    assert found.relative_error < 0.06
    assert found.token_error == pytest.approx(0.5 * math.sqrt(254 / 255), rel=1e-3)
    lost = measure_error([x], [torch.cat([x[:1], torch.zeros_like(x[1:])])])
    assert lost.token_error == pytest.approx(math.sqrt(254 / 255), rel=1e-3), "a row that is lost has error 1"
    assert found.lost_rows == 0 and lost.lost_rows == pytest.approx(254 / 255)


def test_a_tiny_row_that_becomes_large_hides_no_other_error():
    """In units of that row squares leave fp32; the whole message had nan for its error."""
    x, y = torch.tensor([[1.0, 1.0], [1e-25, 0.0]]), torch.tensor([[1.0, 1.0], [0.1, 0.0]])
    found = measure_error([x], [y])
    assert found.relative_error == pytest.approx(0.1 / math.sqrt(2)) and 1e20 < found.token_error < math.inf


@pytest.mark.parametrize("shape, rows", [((2, 3, 4, 4), 2), ((2, 3, 8), 6), ((5,), 1), ((), 1)])
def test_rows_are_those_of_matrices_and_the_samples_of_images(shape, rows):
    x = torch.ones(shape)
    y = x.clone()
    y.view(-1)[: x.numel() // rows] = 0
    assert measure_error([x], [y]).token_error == pytest.approx(math.sqrt(1 / rows))


def test_nothing_sent_is_no_error():
    zero = torch.zeros(4)
    for nothing in (zero, zero[:0]):
        assert measure_error([nothing], [nothing])[1:] == (0.0, 0.0, 1.0, 0.0)
    assert measure_error([zero], [zero + 1])[1:] == (math.inf, math.inf, 0.0, 0.0)
    ints = torch.arange(3)
    assert measure_error([ints], [ints + 1]) == MessageError(0.0, 0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_unknown(bad, side):
    pair = torch.ones(2, 3, 4)
    pair[side, 1, 2] = bad
    assert all(map(math.isnan, measure_error([pair[0]], [pair[1]])))


def test_the_tensor_of_the_benchmark_looks_real():
    """Its tokens were all alike, so the errors it showed were not those of a pretrained model."""
    x = benchmark_tensor((4, 64, 512), torch.bfloat16, torch.device("cpu")).double()
    norms = x.flatten(0, 1).norm(dim=1)
    assert norms[0] / norms.median() == pytest.approx(SINK, rel=0.02)
    assert 0.94 < norms[0] ** 2 / norms.square().sum() < 1
    plain = benchmark_tensor((4, 64, 512), torch.bfloat16, torch.device("cpu"), has_sink=False).double()
    assert torch.equal(plain.flatten(0, 1)[1:], x.flatten(0, 1)[1:]) and plain.abs().max() < 120
    assert benchmark_tensor((512,), torch.float16, torch.device("cpu")).isfinite().all(), "one token"
