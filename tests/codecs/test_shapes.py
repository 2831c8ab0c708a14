"""The matrix that a message is seen as."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec
from ds_compress.codecs.shapes import arithmetic_dtype, as_message, boundary_noise, matrix_shape
from ds_compress.kernels.numerics import is_finite


@pytest.mark.parametrize(
    "shape, expected",
    [((), (1, 1)), ((5,), (1, 5)), ((2, 3, 5), (6, 5)), ((0, 5), (0, 5)), ((4, 0), (4, 0)), ((0,), (1, 0))],
)
def test_shape(shape, expected):
    assert matrix_shape(shape) == expected
    assert torch.zeros(shape).reshape(expected).shape == expected


def test_bf16_stays_bf16_only_on_a_bf16_wire():
    bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    assert arithmetic_dtype(bf16, bf16) == bf16
    assert {arithmetic_dtype(dtype, bf16) for dtype in (fp16, fp32, fp64)} == {fp32}
    assert {arithmetic_dtype(dtype, fp32) for dtype in (bf16, fp16, fp32, fp64)} == {fp32}


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 37, 63])
def test_is_finite_sees_one_bad_value(bad, at):
    x = torch.full((8, 8), 3e38)
    assert is_finite(x)
    x.view(-1)[at] = bad
    assert not is_finite(x)
    assert is_finite(x[:0])


def test_fp16_saturates_but_keeps_inf_and_nan():
    inf, nan = float("inf"), float("nan")
    spec = TensorSpec((2, 3), torch.float16)
    out = as_message(torch.tensor([[7e4, -7e4, 1.5, inf, -inf, nan]]), spec)
    expected = torch.tensor([[65504, -65504, 1.5], [inf, -inf, nan]], dtype=torch.float16)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_noise_belongs_to_the_boundary_alone():
    same = boundary_noise((4, 3), Context(boundary=1, seed=5))
    other_message = Context(boundary=1, seed=5, direction="backward", step=9, micro_batch=2, replica=3)
    assert torch.equal(boundary_noise((4, 3), other_message), same)
    for other in (
        Context(boundary=2, seed=5),
        Context(boundary=1, seed=6),
        Context(boundary=1, seed=5, position=1),
    ):
        assert not torch.equal(boundary_noise((4, 3), other), same)
