import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codecs import sparse
from ds_compress.kernels import native
from ds_compress.kernels.backends import reference
from ds_compress.kernels.topk import cpu as compiled
from ds_compress.kernels.topk.reference import sample_plan
from ds_compress.kernels.topk.selection import Selection, largest

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_sorting(x: torch.Tensor, k: int) -> list[int]:
    """The specification: sort each row stably by falling |x|, nan as infinity; the first k, ascending."""
    chosen = []
    for number, row in enumerate(x.double()):
        size = [math.inf if v != v else abs(v) for v in row.tolist()]
        first = sorted(sorted(range(len(size)), key=lambda i: -size[i])[:k])
        chosen += [number * len(size) + i for i in first]
    return chosen


def assert_k_per_row(selection: Selection, rows: int, d: int, k: int):
    selection = selection.indices
    assert selection.dtype == torch.int64 and selection.shape == (rows * k,)
    assert (selection.diff() > 0).all()
    assert (selection.view(rows, k) // d == torch.arange(rows).unsqueeze(1)).all()


rows_with_ties = st.tuples(st.integers(0, 4), st.integers(1, 40)).flatmap(
    lambda shape: st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-7, math.inf, -math.inf, math.nan]),
        min_size=shape[0] * shape[1],
        max_size=shape[0] * shape[1],
    ).map(lambda values: torch.tensor(values).view(shape))
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=100)
@given(x=rows_with_ties, data=st.data())
def test_exact_is_the_specification_ties_and_nan_included(x, dtype, data):
    x = x.to(dtype)
    k = data.draw(st.integers(1, x.shape[1]))
    expected = by_sorting(x, k)
    assert largest(x, k).indices.tolist() == expected
    assert reference.select_largest(x, k)[0].tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LONG", 0)
        assert largest(x, k).indices.tolist() == expected
        patch.setattr(compiled, "_largest_plan", compiled.LargestPlan)
        patch.setattr(compiled, "first_look", lambda d, k: sample_plan(d, k, 3))
        assert largest(x, k).indices.tolist() == expected


def test_the_unit_vector_of_the_paper():
    x = torch.tensor([[3, -5, 0, 1, -2, 4, 0.5, -0.1, 2, -6]])
    assert largest(x, 3).indices.tolist() == [1, 5, 9]
    assert largest(x, 2).indices.tolist() == [1, 9]


@pytest.mark.parametrize(
    "length, density, k",
    [
        (65536, 0.1, 6554),
        (786432, 0.1, 78644),
        (10, 0.2, 2),
        (10, 0.7, 7),
        (3, 1.0, 3),
        (5, 0.01, 1),
        (0, 0.5, 0),
        (1, 1e-9, 1),
    ],
)
def test_how_many_are_kept(length, density, k):
    assert sparse.count_kept(length, density) == k


@pytest.mark.parametrize(
    "shape, scope, expected",
    [
        ((4, 3, 2), "sample", (4, 6)),
        ((4, 3, 2), "tensor", (1, 24)),
        ((5,), "sample", (1, 5)),
        ((), "sample", (1, 1)),
        ((0, 3), "sample", (0, 0)),
        ((3, 0), "sample", (3, 0)),
        ((3, 0), "tensor", (1, 0)),
    ],
)
def test_rows(shape, scope, expected):
    assert sparse.rows_of(shape, scope) == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(1, 60), st.data())
def test_a_stratified_draw_takes_one_of_each_stretch(rows, d, data):
    k = data.draw(st.integers(1, d))
    selection = sparse.stratified(rows, d, k, torch.Generator().manual_seed(0))
    assert_k_per_row(selection, rows, d, k)
    length = (torch.arange(k + 1) * d // k).diff()
    assert length.sum() == d and length.max() - length.min() <= 1
    stretch = torch.arange(k).repeat_interleave(length)
    assert all(stretch[row % d].tolist() == list(range(k)) for row in selection.indices.view(rows, k))


def test_a_stratified_draw_is_uniform_in_each_stretch():
    selection = sparse.stratified(4000, 10, 3, torch.Generator().manual_seed(0)).indices % 10
    frequency = selection.bincount(minlength=10) / 4000
    assert frequency.tolist() == pytest.approx([1 / 3] * 6 + [1 / 4] * 4, abs=0.03)
