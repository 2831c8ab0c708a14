import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codecs import select
from ds_compress.kernels import native
from ds_compress.kernels.backends import reference
from ds_compress.kernels.topk import cpu as compiled
from ds_compress.kernels.topk.magnitudes import keys, sample_plan
from ds_compress.kernels.topk.selection import Selection, banded

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


def outliers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian [..., 1024] with 6 channels 20 times larger, as in hidden states of transformers."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., [3, 100, 411, 412, 800, 1023]] *= 20
    return x


def energy(x: torch.Tensor, selection: Selection) -> float:
    return selection.gather(x).double().square().sum().item()


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
    assert select.exact(x, k).indices.tolist() == expected
    assert reference.select_largest(x, k)[0].tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LONG", 0)
        assert select.exact(x, k).indices.tolist() == expected
        patch.setattr(compiled, "_largest_plan", compiled.LargestPlan)
        patch.setattr(compiled, "first_look", lambda d, k: sample_plan(d, k, 3))
        assert select.exact(x, k).indices.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 103, 1025])
def test_exact_on_random_rows(dtype, k):
    x = torch.randn(3, 1025, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert select.exact(x, k).indices.tolist() == by_sorting(x, k)


@pytest.mark.parametrize("density", [0.001, 0.1, 0.6])
@pytest.mark.parametrize("kind", ["outliers", "relu", "constant", "rising"])
def test_two_stages_on_long_rows_equal_the_reference(kind, density):
    x = {
        "outliers": outliers(2, 150, 1024).bfloat16(),
        "relu": outliers(2, 150, 1024).relu(),
        "constant": torch.full((2, 150, 1024), 3.0),
        "rising": torch.arange(2.0 * 150 * 1024),
    }[kind].view(2, -1)
    k = select.count_kept(x.shape[1], density)
    assert torch.equal(select.exact(x, k).indices, reference.select_largest(x, k)[0])


def test_the_unit_vector_of_the_paper():
    x = torch.tensor([[3, -5, 0, 1, -2, 4, 0.5, -0.1, 2, -6]])
    assert select.exact(x, 3).indices.tolist() == [1, 5, 9]
    assert select.exact(x, 2).indices.tolist() == [1, 9]


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
    assert select.count_kept(length, density) == k


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
    assert select.rows_of(shape, scope) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 3), d=st.integers(1, 150), seed=st.integers(0, 2**16), data=st.data())
def test_bands_fill_from_the_highest_and_the_cpu_equals_the_reference(dtype, rows, d, seed, data):
    k = data.draw(st.integers(1, d))
    x = torch.randint(-8, 9, (rows, d), generator=torch.Generator().manual_seed(seed)).to(dtype)
    values = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=3))
    low, *others = sorted(values) if data.draw(st.integers(0, 3)) else values
    bounds = (keys(torch.full((rows, 1), low).to(dtype)), *(keys(x.new_tensor(v)).item() for v in others))
    expected = reference.select_banded(x, bounds, k)[0]
    assert torch.equal(banded(x, bounds, k).indices, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LONG", 0)
        selection = banded(x, bounds, k)
    assert torch.equal(selection.indices, expected)
    assert_k_per_row(selection, rows, d, k)
    level = sum((x.abs() >= bound).int() for bound in (low, *others))
    for row, chosen in zip(level, selection.indices.view(rows, k) % d):
        assert sorted(row[chosen].tolist()) == sorted(row.tolist())[-k:]


def test_equal_entries_of_a_band_are_evenly_spaced():
    one = keys(torch.ones(1, 1))
    assert banded(torch.ones(1, 12), (one, one.item() + 1), 4).indices.tolist() == [2, 5, 8, 11]


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thresholds_keep_nearly_the_energy_of_exact_despite_outlier_channels(density, dtype):
    x = outliers(2, 200, 1024).to(dtype).view(2, -1)
    k = select.count_kept(x.shape[1], density)
    selection = select.threshold(x, k)
    assert_k_per_row(selection, *x.shape, k)
    assert energy(x, selection) > 0.99 * energy(x, select.exact(x, k))


def test_thresholds_favour_no_part_of_the_row():
    x = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(1))
    quarters = (select.threshold(x, 1 << 14).indices >> 16).bincount()
    assert quarters.tolist() == pytest.approx([1 << 12] * 4, rel=0.06)


@pytest.mark.parametrize("method", [select.exact, select.threshold])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_entry_is_always_kept(method, bad):
    x = torch.randn(2, 1 << 17, generator=torch.Generator().manual_seed(2))
    x[1, 77777] = bad
    chosen = method(x, 1000)
    assert (1 << 17) + 77777 in chosen.indices.tolist()


@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(40000),
        torch.ones(40000),
        torch.full((40000,), math.nan),
        torch.eye(1, 40000)[0],
        torch.arange(40000.0) * 1e-42,
        torch.arange(40000.0) * 1e34,
    ],
    ids=["zero", "constant", "nan", "one", "subnormal", "huge"],
)
def test_thresholds_on_degenerate_rows(row):
    for k in (1, 4000, 40000):
        selection = select.threshold(row.unsqueeze(0), k)
        assert_k_per_row(selection, 1, 40000, k)
        assert row.isnan().any() or selection.gather(row).max() == row.max()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(1, 60), st.data())
def test_a_stratified_draw_takes_one_of_each_stretch(rows, d, data):
    k = data.draw(st.integers(1, d))
    selection = select.stratified(rows, d, k, torch.Generator().manual_seed(0))
    assert_k_per_row(selection, rows, d, k)
    length = select.segment_lengths(d, k, torch.device("cpu"))
    assert length.sum() == d and length.max() - length.min() <= 1
    stretch = torch.arange(k).repeat_interleave(length)
    assert all(stretch[row % d].tolist() == list(range(k)) for row in selection.indices.view(rows, k))


def test_a_stratified_draw_is_uniform_in_each_stretch():
    selection = select.stratified(4000, 10, 3, torch.Generator().manual_seed(0)).indices % 10
    frequency = selection.bincount(minlength=10) / 4000
    assert frequency.tolist() == pytest.approx([1 / 3] * 6 + [1 / 4] * 4, abs=0.03)
