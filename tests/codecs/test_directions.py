"""Codec entropy with a rank: a few directions that hold most of a message do not drown the others."""

import pytest
import torch

from ds_compress.codec import TensorSpec, build
from ds_compress.codecs.directions import SAMPLE, add_directions, subtract_directions
from ds_compress.codecs.entropy import FACTORS
from ds_compress.codecs.message_error import measure_error
from tests.support.codecs import roundtrip
from tests.support.messages import low_rank_matrix


def young(rows=512, width=512, directions=4, seed=0):
    """Rows as of a model after some steps of training: 1 % of their energy is outside a few directions."""
    generator = torch.Generator().manual_seed(seed)
    strong = low_rank_matrix(directions, rows, width, seed + 1)
    rest = torch.randn(rows, width, generator=generator)
    return strong / strong.norm() + 0.1 * rest / rest.norm()


@pytest.mark.parametrize("bits", [2.5, 3.3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_young_model_keeps_what_its_tokens_differ_by(bits, dtype):
    """From scratch 4 bits cost a Llama 3 % of its loss: most of what a step learned was below the noise."""
    x = young().to(dtype)
    sent = (roundtrip({"name": "entropy", "bits": bits, "rank": rank}, x) for rank in (0, 8))
    plain, apart = (measure_error([x], [y]).token_error for y in sent)
    assert apart < 0.3 * plain


def test_what_all_tokens_have_in_common_is_not_shrunk():
    """Small values become 0, an error that all tokens share. Without it, SmolLM2 loses half as much."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 512, generator=generator) + 0.5 * torch.randn(512, generator=generator)
    shared = []
    for rank in (0, 8):
        y = roundtrip({"name": "entropy", "bits": 2.5, "rank": rank}, x)
        shared.append(((x - y).mean(0).norm() / x.mean(0).norm()).item())
    assert shared[1] < 0.6 * shared[0]


def test_a_sink_leaves_other_tokens_their_coefficients():
    """Token 0 of every pretrained decoder is longer than others by far, 26,000 to 168 in SmolLM2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1, generator=generator) * torch.randn(512, generator=generator)
    x[0] *= 160
    rest, _ = subtract_directions(x, 2)
    assert (rest.norm(dim=1) / x.norm(dim=1)).max() < 0.02


@pytest.mark.parametrize("rows", [3, 100, SAMPLE, 1000])
def test_the_rest_is_no_longer_than_the_message(rows):
    alike = torch.ones(rows, 1).expand(rows, 64)
    for x in (young(rows), torch.randn(rows, 64), torch.zeros(rows, 64), alike):
        rest, factors = subtract_directions(x, 2)
        assert rest.norm() <= 1.05 * x.norm()
        assert torch.allclose(add_directions(rest.clone(), *factors), x, atol=1e-4 * x.abs().max())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_what_no_product_can_hold_is_left_in_the_rest(value):
    x = young(64, 64)
    x[5, 7] = value
    rest, factors = subtract_directions(x, 4)
    assert torch.equal(rest[5].isfinite(), x[5].isfinite())
    assert add_directions(rest, *factors)[9].isfinite().all()


@pytest.mark.parametrize(
    "shape, rank",
    [((2048, 4096), 16), ((2, 256, 576), 16), ((512, 128), 14), ((512, 64), 7), ((64,), 0)],
    ids=str,
)
def test_factors_take_a_limited_share_of_the_packet(shape, rank):
    codec, spec = build({"name": "entropy", "bits": 4, "rank": 16}), TensorSpec(shape, torch.float32)
    _, *parts = codec.layout(spec)
    factors = parts[1:]
    sizes = [torch.Size(part).numel() * dtype.itemsize for part, dtype in factors]
    assert sum(sizes) <= FACTORS * torch.Size(shape).numel() * 4 / 8
    assert (factors[0][0][1] if factors else 0) == rank
