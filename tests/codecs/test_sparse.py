"""Codecs that select entries, and which they select."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.codecs import sparse
from ds_compress.codecs.sidco import above_threshold, least_share, thresholds
from ds_compress.kernels.backends import reference
from ds_compress.kernels.topk.index_coding import CODERS
from ds_compress.kernels.topk.selection import Selection, largest
from tests.support.codecs import DTYPES, roundtrip, send
from tests.support.refusals import refusal

SELECTING = [
    {"name": "topk", "density": 1.0},
    {"name": "topk", "density": 0.3, "rows": "tensor"},
    *({"name": "topk", "indices": coder, "density": 0.01} for coder in CODERS),
    {"name": "topk", "values": {"name": "fp16"}},
    {"name": "randomk"},
    {"name": "randomk", "density": 0.7, "rows": "tensor", "values": "bf16"},
]
FOUR_BITS = {"name": "quantize", "bits": 4, "group_size": 64}


def masked(x, selection):
    kept = torch.zeros_like(x).flatten()
    kept[selection.indices] = selection.gather(x)
    return kept.view(x.shape)


@pytest.mark.parametrize("choice", SELECTING, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0), (0, 5), (3, 5), (2, 3, 205)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_arrives_and_the_gradient_reuses_its_places(choice, shape, dtype):
    codec = build(choice)
    x, grad = torch.randn(2, *shape).to(dtype)
    sender, receiver = Context(), Context()
    y = send(codec, x, sender, receiver)
    assert sender.selection.indices.dtype == torch.int64
    assert sender.selection.indices.tolist() == receiver.selection.indices.tolist()
    assert sender.selection.count == codec.kept(TensorSpec.of(x))
    torch.testing.assert_close(y, masked(x, sender.selection), rtol=2**-8, atol=0)

    backward = build({"name": "topk", "indices": "reuse"}).paired_with(codec)
    sender.direction = receiver.direction = "backward"
    assert torch.equal(send(backward, grad, receiver, sender), masked(grad, receiver.selection))
    assert backward.layout(TensorSpec.of(grad)) == (((sender.selection.count,), dtype),)


def test_a_kept_zero_is_kept():
    ctx = Context()
    send(build({"name": "topk", "density": 0.5}), torch.zeros(1, 6), Context(), ctx)
    assert ctx.selection.indices.tolist() == [0, 1, 2]


def test_rows_of_a_sample_do_not_starve_each_other():
    x = torch.stack([torch.full((4,), 100.0), torch.tensor([1.0, 2.0, 3.0, 4.0])])
    assert (roundtrip({"name": "topk", "density": 0.5}, x) != 0).sum(1).tolist() == [2, 2]
    assert (roundtrip({"name": "topk", "density": 0.5, "rows": "tensor"}, x) != 0).sum(1).tolist() == [4, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reuse_shows_an_overflow_outside_the_selection(bad):
    forward = build({"name": "topk", "density": 0.25})
    ctx = Context()
    forward.encode(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), ctx)
    backward = build({"name": "topk", "indices": "reuse"}).paired_with(forward)
    assert not send(backward, torch.tensor([[1.0, 0.0, bad, 0.0]]), ctx, ctx).isfinite().all()


@pytest.mark.parametrize(
    "options, dtype, bits",
    [
        ({"indices": "bitmask", "values": "bf16"}, torch.float32, 2.61),
        ({"indices": "rice", "values": "bf16"}, torch.float32, 2.12),
        ({"indices": "rice", "values": FOUR_BITS}, torch.float32, 0.97),
        ({"indices": "reuse", "values": "bf16"}, torch.float32, 1.61),
        ({}, torch.bfloat16, 2.61),
        ({"density": 0.01, "indices": "int16"}, torch.bfloat16, 0.33),
        ({"density": 0.01}, torch.bfloat16, 0.33),
        ({"density": 0.01, "indices": "rice"}, torch.bfloat16, 0.25),
    ],
)
def test_bits_per_value_of_four_million_entries(options, dtype, bits):
    layout = build({"name": "topk", **options}).layout(TensorSpec((1, 4096, 1024), dtype))
    nbytes = sum(torch.Size(shape).numel() * part.itemsize for shape, part in layout)
    assert bits - 0.02 < 8 * nbytes / 2**22 <= bits


def test_random_entries_differ_from_message_to_message_and_agree_on_both_sides():
    codec, x, seen = build("randomk"), torch.randn(4, 1000), set()
    changes = {"micro_batch": 1, "step": 1, "direction": "backward", "boundary": 1, "replica": 1}
    for place in ({}, *({name: value} for name, value in changes.items())):
        sender, receiver = Context(**place), Context(**place)
        send(codec, x, sender, receiver)
        assert sender.selection.indices.tolist() == receiver.selection.indices.tolist()
        seen.add(tuple(sender.selection.indices.tolist()))
    assert len(seen) == 6


def test_reuse_without_a_selection_is_refused():
    codec = build({"name": "topk", "indices": "reuse"})
    line = refusal(codec.encode, torch.ones(4), Context(boundary=3))
    assert "'reuse' at boundary 3, forward: no selection" in line
    ctx = Context(direction="backward")
    ctx.selection = Selection.at(torch.tensor([0, 1]), 4)
    assert "kept 2 entries, expected 1" in refusal(codec.encode, torch.ones(4), ctx)


def by_sorting(x: torch.Tensor, k: int) -> list[int]:
    """The specification: sort each row stably by falling |x|, nan as infinity; the first k, ascending."""
    size = x.double().abs().nan_to_num(math.inf, math.inf)
    first = size.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    return (first + x.shape[1] * torch.arange(len(x))[:, None]).flatten().tolist()


@st.composite
def rows_with_ties(draw):
    rows, d = draw(st.integers(0, 4)), draw(st.integers(1, 40))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-7, math.inf, -math.inf, math.nan])
    return torch.tensor(draw(st.lists(values, min_size=rows * d, max_size=rows * d))).view(rows, d)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=100)
@given(x=rows_with_ties(), data=st.data())
def test_exact_is_the_specification_ties_and_nan_included(x, dtype, data):
    x = x.to(dtype)
    k = data.draw(st.integers(1, x.shape[1]))
    expected = by_sorting(x, k)
    assert largest(x, k).indices.tolist() == expected
    assert reference.select_largest(x, k)[0].tolist() == expected


@pytest.mark.parametrize(
    "length, density, k", [(786432, 0.1, 78644), (10, 0.7, 7), (3, 1.0, 3), (5, 0.01, 1), (0, 0.5, 0)]
)
def test_how_many_are_kept(length, density, k):
    assert sparse.count_kept(length, density) == k


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(1, 60), st.data())
def test_a_stratified_draw_takes_one_of_each_stretch(rows, d, data):
    k = data.draw(st.integers(1, d))
    selection = sparse.stratified(rows, d, k, torch.Generator().manual_seed(0)).indices
    assert selection.dtype == torch.int64 and (selection.diff() > 0).all()
    assert (selection.view(rows, k) // d == torch.arange(rows).unsqueeze(1)).all()
    length = (torch.arange(k + 1) * d // k).diff()
    assert length.sum() == d and length.max() - length.min() <= 1
    stretch = torch.arange(k).repeat_interleave(length)
    assert all(stretch[row % d].tolist() == list(range(k)) for row in selection.view(rows, k))


def test_a_stratified_draw_is_uniform_in_each_stretch():
    selection = sparse.stratified(4000, 10, 3, torch.Generator().manual_seed(0)).indices % 10
    frequency = selection.bincount(minlength=10) / 4000
    assert frequency.tolist() == pytest.approx([1 / 3] * 6 + [1 / 4] * 4, abs=0.03)


LENGTH = 100_000
SAMPLES = {
    "laplace": torch.distributions.Laplace(0.0, 1.0),
    "normal": torch.distributions.Normal(0.0, 1.0),
    "student-t": torch.distributions.StudentT(3.0),
}


def drawn(name):
    torch.manual_seed(0)
    return SAMPLES[name].sample((2, LENGTH))


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("name, share", [("laplace", 0.99), ("normal", 0.95), ("student-t", 0.88)])
def test_most_of_the_energy_is_kept(name, share, density):
    x, k = drawn(name), round(density * LENGTH)
    selection = above_threshold(x, k)
    kept = x.flatten()[selection.indices].view(2, k)
    assert (kept.norm(dim=1) >= share * x.abs().topk(k).values.norm(dim=1)).all()
    assert (selection.indices.diff() > 0).all(), "coders need ascending entries"
    assert ((selection.indices.view(2, k) // LENGTH) == torch.tensor([[0], [1]])).all(), "k of each row"


@pytest.mark.parametrize("density", [0.3, 0.1, 0.01])
def test_the_fit_finds_the_share_of_its_own_distribution(density):
    x = drawn("laplace").abs()
    found = (x > thresholds(x, density)).float().mean(1)
    assert found == pytest.approx([density] * 2, rel=0.05)


@pytest.mark.parametrize("x", [torch.zeros(1, 50), torch.ones(3, 7), torch.full((1, 9), 1e-45)], ids=str)
def test_rows_without_a_tail_fill_the_packet(x):
    for k in (1, x.shape[1] - 1, x.shape[1]):
        assert len(above_threshold(x, k).indices.unique()) == len(x) * k


@pytest.mark.parametrize("d", [40, 1000])
@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.01])
@pytest.mark.parametrize("hidden", ["zeros first", "giant last", "two levels"])
def test_a_selection_is_never_without_energy(hidden, density, d):
    """Where all entries but zeros were equal, none was above the threshold, and the zeros were sent. Error
    feedback then never sent the others, though the codec was called a contraction."""
    k = max(1, round(density * d))
    x = torch.ones(1, d)
    place, value = {
        "zeros first": (slice(k), 0),
        "giant last": (-1, d / 4),
        "two levels": (slice(d // 2, d), 40),
    }[hidden]
    x[0, place] = value
    kept = x.flatten()[above_threshold(x, k).indices]
    assert kept.square().sum() >= least_share(k, d) * x.square().sum() > 0


def test_its_packets_are_as_large_as_exact_ones_and_its_contraction_is_weaker():
    spec = TensorSpec((4, 4096), torch.float32)
    exact, fitted = (build({"name": "topk", "select": select}) for select in ("exact", "sidco"))
    assert exact.layout(spec) == fitted.layout(spec)
    assert exact.stability(spec).constant < fitted.stability(spec).constant <= 1
    assert fitted.stability(spec).kind == "contraction"
