import logging

import pytest
import torch

import ds_compress.codecs  # noqa: F401  (registers)
from ds_compress import select
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError

SHAPES = [(), (0,), (1,), (7,), (3, 0), (0, 5), (3, 5), (2, 3, 205)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SELECTING = [
    {"name": "topk"},
    {"name": "topk", "density": 1.0},
    {"name": "topk", "density": 0.3, "scope": "tensor", "indices": "bitmask"},
    {"name": "topk", "density": 0.01, "indices": "int32"},
    {"name": "topk", "values": "bf16"},
    {"name": "topk", "values": {"name": "fp16"}},
]


def random(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def send(codec, x, sender=None, receiver=None):
    """Through encode, a check of the layout, and decode."""
    spec = TensorSpec.of(x)
    parts = codec.encode(x, sender or Context())
    assert tuple((tuple(p.shape), p.dtype) for p in parts) == codec.layout(spec)
    y = codec.decode(tuple(p.clone() for p in parts), spec, receiver or Context())
    assert TensorSpec.of(y) == spec
    return y


def masked(x, selection):
    kept = torch.zeros_like(x).flatten()
    kept[selection] = x.flatten()[selection]
    return kept.view(x.shape)


@pytest.mark.parametrize("choice", SELECTING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_arrives_and_the_gradient_reuses_its_places(choice, shape, dtype):
    codec = build(choice)
    x, sender, receiver = random(shape, dtype), Context(), Context()
    y = send(codec, x, sender, receiver)
    assert sender.selection.tolist() == receiver.selection.tolist()
    rows, length = select.rows_of(shape, codec.options.scope)
    assert sender.selection.numel() == rows * select.kept_of(length, codec.options.density) == codec.kept(
        TensorSpec.of(x))
    torch.testing.assert_close(y, masked(x, sender.selection), rtol=2**-8, atol=0)

    backward = build({"name": "topk", "indices": "reuse"}).paired(codec)
    grad = random(shape, dtype, seed=1)
    sender.direction = receiver.direction = "backward"
    assert torch.equal(send(backward, grad, receiver, sender), masked(grad, receiver.selection))
    assert backward.layout(TensorSpec.of(grad)) == (((sender.selection.numel(),), dtype),)


def test_reuse_is_the_gradient_of_the_sparsified_map():
    forward = build({"name": "topk", "density": 0.3})
    x, ctx = random((2, 50)).requires_grad_(), Context()
    with torch.no_grad():
        forward.encode(x, ctx)
    mask = masked(torch.ones(2, 50), ctx.selection)
    grad = random((2, 50), seed=1)
    (x * mask).backward(grad)
    assert torch.equal(x.grad, send(build({"name": "topk", "indices": "reuse"}).paired(forward), grad, ctx, ctx))


def test_a_kept_zero_is_kept():
    ctx = Context()
    send(build({"name": "topk", "density": 0.5}), torch.zeros(1, 6), Context(), ctx)
    assert ctx.selection.tolist() == [0, 1, 2]


def test_rows_of_a_sample_do_not_starve_each_other():
    x = torch.stack([torch.full((4,), 100.0), torch.tensor([1.0, 2.0, 3.0, 4.0])])
    assert (send(build({"name": "topk", "density": 0.5}), x) != 0).sum(1).tolist() == [2, 2]
    assert (send(build({"name": "topk", "density": 0.5, "scope": "tensor"}), x) != 0).sum(1).tolist() == [4, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reuse_shows_an_overflow_outside_the_selection(bad):
    forward = build({"name": "topk", "density": 0.25})
    ctx = Context()
    forward.encode(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), ctx)
    backward = build({"name": "topk", "indices": "reuse"}).paired(forward)
    assert not send(backward, torch.tensor([[1.0, 0.0, bad, 0.0]]), ctx, ctx).isfinite().all()


def test_scale():
    codec, x = build({"name": "topk"}), random((2, 500))
    for power in (-100, 100):
        assert torch.equal(send(codec, x * 2.0**power), send(codec, x) * 2.0**power)


def test_reuse_without_a_selection_is_refused():
    codec = build({"name": "topk", "indices": "reuse"})
    with pytest.raises(CompressionError, match="'reuse' at boundary 3, forward: no selection"):
        codec.encode(torch.ones(4), Context(boundary=3))
    ctx = Context(direction="backward")
    ctx.selection = torch.tensor([0, 1])
    with pytest.raises(CompressionError, match="kept 2 entries, expected 1"):
        codec.encode(torch.ones(4), ctx)


def test_pairing():
    forward = build({"name": "topk", "density": 0.3, "scope": "tensor"})
    followed = build({"name": "topk", "indices": "reuse"}).paired(forward)
    assert (followed.options.density, followed.options.scope) == (0.3, "tensor")
    independent = build({"name": "topk", "density": 0.2})
    assert independent.paired(forward) is independent
    with pytest.raises(CompressionError, match="0.2 backward.*'topk' keeps 0.3"):
        build({"name": "topk", "indices": "reuse", "density": 0.2}).paired(forward)


def test_reuse_with_nothing_to_reuse_sends_indices_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "ds_compress"):
        codec = build({"name": "topk", "indices": "reuse", "density": 0.2}).paired(build("bf16"))
    assert (codec.options.indices, codec.options.density) == ("auto", 0.2)
    assert len(caplog.records) == 1 and "'bf16'" in caplog.text


@pytest.mark.parametrize("options, message", [
    ({"density": 0}, "codec.density: 0 is not allowed"),
    ({"density": 1.5}, "codec.density: 1.5 is not allowed"),
    ({"values": "bf61"}, "did you mean 'bf16'"),
    ({"values": "topk"}, "cannot be selected from a second time"),
    ({"indices": "int23"}, "did you mean 'int32'"),
])
def test_refusals(options, message):
    with pytest.raises(CompressionError, match=message):
        build({"name": "topk", **options})
