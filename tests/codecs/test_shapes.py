"""Messages as matrices: which rows are zeros."""

import pytest
import torch

from ds_compress.codecs.shapes import FIRST, matrix_shape, zero_rows


@pytest.mark.parametrize(
    "shape", [(40, 30), (40, FIRST), (2, 20, 30), (40, 1), (0, 30), (40, 0), (30,), ()], ids=str
)
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_a_row_is_zero_if_all_its_values_are(shape, share):
    """A CPU looks at the first values of a row, and at others only where these are zeros."""
    x = torch.where(torch.rand(shape) < share, torch.randn(shape), 0)
    rows = [bool(row.any()) for row in x.reshape(matrix_shape(shape))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert zero_rows(x.to(dtype)).tolist() == [not found for found in rows]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-30])
@pytest.mark.parametrize("place", [0, FIRST - 1, FIRST, 29])
def test_any_value_makes_a_row_one_that_is_sent(value, place):
    x = torch.zeros(3, 30)
    x[1, place] = value
    assert zero_rows(x).tolist() == [True, False, True]
