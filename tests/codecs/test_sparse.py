import pytest
import torch

import ds_compress.codecs  # noqa: F401  (registers)
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.kernels.topk.selection import Selection
from tests.support.codecs import roundtrip, send

SHAPES = [(), (0,), (1,), (7,), (3, 0), (0, 5), (3, 5), (2, 3, 205)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SELECTING = [
    {"name": "topk"},
    {"name": "topk", "density": 1.0},
    {"name": "topk", "density": 0.3, "rows": "tensor", "indices": "bitmask"},
    {"name": "topk", "density": 0.01, "indices": "int32"},
    {"name": "topk", "indices": "int16", "values": "bf16"},
    {"name": "topk", "indices": "rice", "values": {"name": "fp16"}},
    {"name": "randomk"},
    {"name": "randomk", "density": 0.7, "rows": "tensor"},
]


def random(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def masked(x, selection):
    kept = torch.zeros_like(x).flatten()
    kept[selection.indices] = selection.gather(x)
    return kept.view(x.shape)


@pytest.mark.parametrize("choice", SELECTING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_arrives_and_the_gradient_reuses_its_places(choice, shape, dtype):
    codec = build(choice)
    x, sender, receiver = random(shape, dtype), Context(), Context()
    y = send(codec, x, sender, receiver)
    assert sender.selection.indices.dtype == torch.int64
    assert sender.selection.indices.tolist() == receiver.selection.indices.tolist()
    assert sender.selection.count == codec.kept(TensorSpec.of(x))
    torch.testing.assert_close(y, masked(x, sender.selection), rtol=2**-8, atol=0)

    backward = build({"name": "topk", "indices": "reuse"}).paired_with(codec)
    grad = random(shape, dtype, seed=1)
    sender.direction = receiver.direction = "backward"
    assert torch.equal(send(backward, grad, receiver, sender), masked(grad, receiver.selection))
    assert backward.layout(TensorSpec.of(grad)) == (((sender.selection.count,), dtype),)


def test_kept_values_through_a_quantizer():
    codec, x, ctx = (
        build({"name": "topk", "values": {"name": "quantize", "bits": 8}}),
        random((2, 30, 40)),
        Context(),
    )
    y = send(codec, x, ctx, ctx)
    kept = ctx.selection.gather(x)
    step = (kept.max() - kept.min()) / 255
    torch.testing.assert_close(y, masked(x, ctx.selection), rtol=0, atol=0.6 * step.item())
    assert torch.equal(y != 0, masked(x, ctx.selection) != 0)


def test_reuse_is_the_gradient_of_the_sparsified_map():
    forward = build({"name": "topk", "density": 0.3})
    x, ctx = random((2, 50)).requires_grad_(), Context()
    with torch.no_grad():
        forward.encode(x, ctx)
    mask = masked(torch.ones(2, 50), ctx.selection)
    grad = random((2, 50), seed=1)
    (x * mask).backward(grad)
    assert torch.equal(
        x.grad, send(build({"name": "topk", "indices": "reuse"}).paired_with(forward), grad, ctx, ctx)
    )


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
        (
            {"indices": "rice", "values": {"name": "quantize", "bits": 4, "group_size": 64}},
            torch.float32,
            0.97,
        ),
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
    codec, x = build("randomk"), random((4, 1000))
    seen = {}
    for place in [
        {},
        {"micro_batch": 1},
        {"step": 1},
        {"direction": "backward"},
        {"boundary": 1},
        {"replica": 1},
    ]:
        sender, receiver = Context(**place), Context(**place)
        send(codec, x, sender, receiver)
        assert sender.selection.indices.tolist() == receiver.selection.indices.tolist()
        seen[tuple(sender.selection.indices.tolist())] = place
    assert len(seen) == 6


def test_reuse_without_a_selection_is_refused():
    codec = build({"name": "topk", "indices": "reuse"})
    with pytest.raises(CompressionError, match="'reuse' at boundary 3, forward: no selection"):
        codec.encode(torch.ones(4), Context(boundary=3))
    ctx = Context(direction="backward")
    ctx.selection = Selection.at(torch.tensor([0, 1]), 4)
    with pytest.raises(CompressionError, match="kept 2 entries, expected 1"):
        codec.encode(torch.ones(4), ctx)
