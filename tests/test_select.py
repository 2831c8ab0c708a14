import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress import select


def by_sorting(x: torch.Tensor, k: int) -> list[int]:
    """The specification: a stable sort of each row by falling |x|, nan first, then the first k, ascending."""
    chosen = []
    for number, row in enumerate(x.double()):
        size = [float("inf") if v != v else abs(v) for v in row.tolist()]
        first = sorted(sorted(range(len(size)), key=lambda i: -size[i])[:k])
        chosen += [number * len(size) + i for i in first]
    return chosen


rows_with_ties = st.tuples(st.integers(0, 4), st.integers(1, 40)).flatmap(
    lambda shape: st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-30, float("inf"), float("-inf"), float("nan")]),
        min_size=shape[0] * shape[1], max_size=shape[0] * shape[1],
    ).map(lambda values: torch.tensor(values).view(shape))
)


@settings(deadline=None, max_examples=200)
@given(rows_with_ties, st.data())
def test_exact_is_the_specification_ties_and_nan_included(x, data):
    k = data.draw(st.integers(1, x.shape[1]))
    assert select.exact(x, k).tolist() == by_sorting(x, k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_on_random_rows(dtype):
    x = torch.randn(3, 1025, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert select.exact(x, 103).tolist() == by_sorting(x, 103)


def test_the_unit_vector_of_the_paper():
    x = torch.tensor([[3, -5, 0, 1, -2, 4, 0.5, -0.1, 2, -6]])
    assert select.exact(x, 3).tolist() == [1, 5, 9]
    assert select.exact(x, 2).tolist() == [1, 9]


@pytest.mark.parametrize("length, density, k", [
    (65536, 0.1, 6554), (786432, 0.1, 78644), (10, 0.2, 2), (10, 0.7, 7), (3, 1.0, 3), (5, 0.01, 1), (0, 0.5, 0),
    (1, 1e-9, 1),
])
def test_how_many_are_kept(length, density, k):
    assert select.kept_of(length, density) == k


@pytest.mark.parametrize("shape, scope, expected", [
    ((4, 3, 2), "sample", (4, 6)), ((4, 3, 2), "tensor", (1, 24)), ((5,), "sample", (1, 5)), ((), "sample", (1, 1)),
    ((0, 3), "sample", (0, 0)), ((3, 0), "sample", (3, 0)), ((3, 0), "tensor", (1, 0)),
])
def test_rows(shape, scope, expected):
    assert select.rows_of(shape, scope) == expected
