"""Codec entropy: no row of a message is lost because others are larger; with a rank, a few directions that
hold most of a message do not drown the others."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.codecs.directions import SAMPLE, add_directions, subtract_directions
from ds_compress.codecs.entropy import FACTORS
from ds_compress.codecs.message_error import measure_error
from ds_compress.kernels.entropy.format import frame_of
from tests.support.codecs import roundtrip
from tests.support.kernels import EACH_TARGET, alike, compiled_for
from tests.support.messages import low_rank_matrix

NEAREST = {"name": "entropy", "bits": 2.5}
DITHER = {"name": "entropy", "bits": 2, "rounding": "dither"}
RANK = {"name": "entropy", "bits": 3, "rank": 16}
BOTH = pytest.mark.parametrize("codec", [NEAREST, DITHER, RANK], ids=["nearest", "dither", "rank"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def rows(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def errors_of_rows(x, y):
    return (x.double() - y.double()).norm(dim=1) / x.double().norm(dim=1)


@BOTH
@pytest.mark.parametrize("factor", [2.0**-4, 2.0**-20, 2.0**-60])
def test_a_small_row_is_coded_as_finely_as_the_others(codec, factor):
    """A row 15 times smaller than the median became zeros; an RMSNorm behind it made gradients explode."""
    x = rows(64, 512)
    x[7] *= factor
    errors = errors_of_rows(x, roundtrip(codec, x))
    assert errors[7] < 1.5 * errors.median()


@BOTH
def test_one_huge_row_leaves_the_others_alone(codec):
    """One gradient 100,000 times as large as the others took all levels of the quantizer."""
    x = rows(64, 512)
    usual = errors_of_rows(x, roundtrip(codec, x)).median()
    x[7] *= 1e5
    errors = errors_of_rows(x, roundtrip(codec, x))
    assert errors.median() < 1.2 * usual and errors[7] < usual


@BOTH
@pytest.mark.parametrize("small", [3, 40, 61])
def test_rows_with_small_channels_leave_the_others_alone(codec, small):
    """They lower the median level, and the others were shifted down by eight octaves and lost."""
    x = rows(64, 512)
    usual = errors_of_rows(x, roundtrip(codec, x)).median()
    x[:small, ::2] *= 2.0**-20
    errors = errors_of_rows(x, roundtrip(codec, x))
    assert errors.max() < 1.5 * usual


@BOTH
def test_a_message_of_two_magnitudes_keeps_both(codec):
    """Half of the rows are a million times larger: no step suits both."""
    x = rows(64, 512)
    x[::2] *= 1e6
    errors = errors_of_rows(x, roundtrip(codec, x))
    assert errors.max() < 1


@BOTH
def test_shifts_belong_to_the_declared_size(codec):
    """Those of [2, 26] were 2 bytes more."""
    for shape in ((64, 512), (8, 8, 96), (100, 3), (32, 3, 8, 8), (4096,), (2, 26), (3, 40), (5, 64)):
        x = torch.randn(shape)
        layout = build(codec).layout(TensorSpec.of(x))
        size = sum(torch.Size(part).numel() * dtype.itemsize for part, dtype in layout)
        declared = max(2 * (min(x.numel(), 64) + 16), x.numel() * codec["bits"] / 8)
        assert declared - 4 <= size <= declared
        assert [part.shape for part in build(codec).encode(x, Context())] == [shape for shape, _ in layout]


@EACH_TARGET
@DTYPES
@pytest.mark.parametrize("dither", [None, 7], ids=["nearest", "dither"])
@pytest.mark.extended(keep=1)
def test_both_backends_shift_alike(target, dtype, dither):
    """Rows begin and end within the parts that C++ reads at a time."""
    x = rows(97, 77) * torch.exp2(torch.randint(-12, 12, (97, 1)).float())
    x[3] = 0
    broken = x.clone()
    broken[50, 8], broken[51, 9] = torch.inf, torch.nan
    decoded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    with compiled_for(target):
        for part in (x, broken, x[:40], x[3:6], torch.zeros(4, 77), rows(9, 77), rows(3, 2000) * x[:3, :1]):
            part, frame = part.to(dtype), frame_of(part.numel(), 2.5, dither is not None)
            for tolerance in (0, 2):
                words, shifts = alike(lambda backend: backend.encode_entropy(part, frame, dither, tolerance))
            for its in (shifts, torch.arange(-128, 128)[::3][: len(part)].to(torch.int8)):
                code = words, frame, decoded, dither, its[-len(part) :].repeat(2)[: len(part)]
                alike(lambda backend: backend.decode_entropy(*code))


def young(rows=512, width=512, directions=4, seed=0):
    """Rows as of a model after some steps of training: 1 % of their energy is outside a few directions."""
    generator = torch.Generator().manual_seed(seed)
    strong = low_rank_matrix(directions, rows, width, seed + 1)
    rest = torch.randn(rows, width, generator=generator)
    return strong / strong.norm() + 0.1 * rest / rest.norm()


@pytest.mark.parametrize("bits", [2.5, 3.3, 4])
@DTYPES
def test_a_young_model_keeps_what_its_tokens_differ_by(bits, dtype):
    """From scratch 4 bits cost a Llama 3 % of its loss: most of what a step learned was below the noise."""
    x = young().to(dtype)
    sent = (roundtrip({"name": "entropy", "bits": bits, "rank": rank}, x) for rank in (0, 8))
    plain, apart = (measure_error([x], [y]).token_error for y in sent)
    assert apart < 0.3 * plain


def test_what_all_tokens_have_in_common_is_not_shrunk():
    """Small values become 0, an error that all tokens share. Without it, SmolLM2 loses half as much."""
    x = torch.randn(512, 512) + 0.5 * torch.randn(512)
    shared = []
    for rank in (0, 8):
        y = roundtrip({"name": "entropy", "bits": 2.5, "rank": rank}, x)
        shared.append(((x - y).mean(0).norm() / x.mean(0).norm()).item())
    assert shared[1] < 0.6 * shared[0]


def test_a_sink_leaves_other_tokens_their_coefficients():
    """Token 0 of every pretrained decoder is longer than others by far, 26,000 to 168 in SmolLM2."""
    x = torch.randn(256, 1) * torch.randn(512)
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
    """A row with an infinite value left the whole message without directions."""
    x = young(64, 64)
    x[5, 7] = value
    given, others = x.clone(), torch.arange(64) != 5
    rest, factors = subtract_directions(x, 4)
    assert torch.equal(rest[5].isfinite(), x[5].isfinite())
    assert rest[others].norm() < 0.5 * x[others].norm()
    assert torch.equal(x.nan_to_num(7), given.nan_to_num(7))
    assert add_directions(rest, *factors)[9].isfinite().all()


@pytest.mark.parametrize(
    "shape, rank",
    [((2048, 4096), 16), ((2, 256, 576), 16), ((512, 128), 14), ((512, 64), 7), ((64,), 0)],
    ids=str,
)
def test_factors_take_a_limited_share_of_the_packet(shape, rank):
    codec, spec = build({"name": "entropy", "bits": 4, "rank": 16}), TensorSpec(shape, torch.float32)
    factors = codec.layout(spec)[2:]
    sizes = [torch.Size(part).numel() * dtype.itemsize for part, dtype in factors]
    assert sum(sizes) <= FACTORS * torch.Size(shape).numel() * 4 / 8
    assert (factors[0][0][1] if factors else 0) == rank
