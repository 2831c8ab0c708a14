"""Codec entropy: no row of a message is lost because others are larger, and rows of zeros stay zeros."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.entropy.format import frame_of
from tests.support.codecs import assert_same_bits, roundtrip
from tests.support.kernels import EACH_TARGET, compiled_for

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
@DTYPES
@pytest.mark.parametrize("shape", [(64, 256), (4, 16, 256)])
def test_rows_of_zeros_stay_zeros(codec, dtype, shape):
    """The last token of each sequence has no gradient. Dither sent half a step of noise in its place, and
    Adam makes full steps of noise."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[::2] = 0
    y = roundtrip(codec, x)
    assert y.any() and not y[x == 0].any()


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
                words, shifts = cpu.encode_rows(part, tolerance, frame, dither)
                expected = reference.encode_rows(part, tolerance, frame, dither)
                assert_same_bits((words, shifts), expected)
            for its in (shifts, torch.arange(-128, 128)[::3][: len(part)].to(torch.int8)):
                code = words, its[-len(part) :].repeat(2)[: len(part)], frame, decoded, dither
                assert_same_bits(cpu.decode_rows(*code), reference.decode_rows(*code))
