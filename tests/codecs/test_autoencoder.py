"""autoencoder: two linear layers whose gradients cross the boundary, trained by Adam on every replica."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from tests.support.codecs import relative_error
from tests.support.messages import any_shape


class AutoencoderBoundary:
    """Two sides that train: messages by micro-batch, memory and stash as a boundary keeps them."""

    def __init__(self, seed=0, replica=0, **options):
        self.codec = build({"name": "autoencoder", **options})
        self.memories = {}, {}  # forward sender, forward receiver
        self.stashes = {}
        self.fields = {"seed": seed, "replica": replica}

    def send(self, x, direction="forward", micro_batch=0):
        stashes = self.stashes.setdefault(micro_batch, ({}, {}))
        sides = [
            Context(direction=direction, micro_batch=micro_batch, memory=memory, stash=stash, **self.fields)
            for memory, stash in zip(self.memories, stashes)
        ]
        sender, receiver = sides if direction == "forward" else sides[::-1]
        spec = TensorSpec.of(x)
        parts = self.codec.encode(x, sender)
        assert tuple((tuple(part.shape), part.dtype) for part in parts) == self.codec.layout(spec)
        out = self.codec.decode(parts, spec, receiver)
        assert TensorSpec.of(out) == spec
        for part in parts:
            part.fill_(torch.nan)  # the buffer receives the next message
        return out

    def end_step(self, average=lambda gradient: gradient):
        for memory in self.memories:
            self.codec.end_step(memory, average)

    def entry(self, weight, suffix=""):
        """`encoder` or `decoder`, or what belongs to it, from the side that holds it."""
        (found,) = (
            memory[key] for memory in self.memories for key in memory if key.endswith(f".{weight}{suffix}")
        )
        return found

    def snapshot(self):
        return [dict(memory) for memory in self.memories]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(memories, others):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(memories, others)
    )


@pytest.mark.parametrize(
    "dtype, wire, tolerance",
    [(torch.float64, "fp32", 1e-5), (torch.float32, "bf16", 1e-2), (torch.bfloat16, "bf16", 2e-2)],
)
def test_messages_and_gradients_are_those_of_two_linear_layers(dtype, wire, tolerance):
    boundary = AutoencoderBoundary(width=5, dtype=wire)
    expected = {"encoder": 0.0, "decoder": 0.0}
    micro_batches = [
        (randn(4, 6, 16, seed=i).to(dtype), randn(4, 6, 16, seed=10 + i).to(dtype)) for i in range(3)
    ]
    outs = [
        boundary.send(x, micro_batch=i) for i, (x, _) in enumerate(micro_batches)
    ]  # all forward first: 1F1B
    for i, (x, g) in enumerate(micro_batches):
        e, d = (boundary.entry(weight).double().requires_grad_() for weight in ("encoder", "decoder"))
        leaf = x.double().requires_grad_()
        out = leaf @ e @ d
        out.backward(g.double())
        assert relative_error(outs[i], out.detach()) < tolerance
        assert relative_error(boundary.send(g, "backward", micro_batch=i), leaf.grad) < tolerance
        expected = {"encoder": expected["encoder"] + e.grad, "decoder": expected["decoder"] + d.grad}
    for weight, gradient in expected.items():
        assert relative_error(boundary.entry(weight, ".gradient"), gradient) < tolerance


def test_starts_as_an_orthogonal_projection_on_every_replica():
    x = randn(10, 16)
    first, second = (
        AutoencoderBoundary(seed=3, width=4, dtype="fp32"),
        AutoencoderBoundary(seed=3, replica=5, width=4, dtype="fp32"),
    )
    out = first.send(x)
    torch.testing.assert_close(first.send(out, micro_batch=1), out)  # a projection
    second.send(x, micro_batch=7)
    e = first.entry("encoder")
    torch.testing.assert_close(e.T @ e, torch.eye(4))
    assert torch.equal(e, second.entry("encoder")) and torch.equal(e.T, first.entry("decoder"))
    other = AutoencoderBoundary(seed=4, width=4)
    other.send(x)
    assert not torch.equal(e, other.entry("encoder"))


def test_keeps_no_graph():
    """A stage sends its output with the graph that made it."""
    boundary = AutoencoderBoundary(width=3)
    boundary.send(randn(8, 16).requires_grad_())
    boundary.send(randn(8, 16).requires_grad_(), "backward")
    kept = [*boundary.memories, *boundary.stashes[0]]
    assert all(kept) and not any(value.requires_grad for entries in kept for value in entries.values())


@pytest.mark.parametrize(
    "width, h, expected", [(None, 64, 8), (None, 5, 1), (20, 64, 20), (20, 16, 16), (None, 0, 0)]
)
def test_width(width, h, expected):
    options = {} if width is None else {"width": width}
    layout = build({"name": "autoencoder", **options}).layout(TensorSpec((2, 3, h), torch.float32))
    assert layout == (((6, expected), torch.bfloat16),)


def test_backward_without_forward_is_refused():
    x = randn(4, 8)
    with pytest.raises(
        CompressionError, match=r"^codec 'autoencoder' at boundary 2: .* without its forward message"
    ):
        build("autoencoder").encode(x, Context(boundary=2, direction="backward"))
    with pytest.raises(CompressionError, match="without its forward message"):
        parts = (torch.zeros(4, 1, dtype=torch.bfloat16),)
        build("autoencoder").decode(parts, TensorSpec.of(x), Context(direction="backward"))


@settings(max_examples=40, deadline=None)
@given(x=any_shape(), width=st.integers(1, 12))
def test_any_shape(x, width):
    boundary = AutoencoderBoundary(width=width, dtype="fp32")
    before = x.clone()
    out = boundary.send(x)
    if x.numel() and width >= (x.shape[-1] if x.shape else 1):
        torch.testing.assert_close(out, x, rtol=1e-2, atol=1e-2)
    boundary.send(out - x, "backward")
    boundary.end_step()
    assert torch.equal(x, before)
    assert all(value.isfinite().all() for memory in boundary.memories for value in memory.values())


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_learns_low_rank_data(wire):
    """The loss is half the squared error of what arrives, so the gradient is the error."""
    boundary = AutoencoderBoundary(width=4, lr=1e-2, dtype=wire)
    directions = randn(4, 24, seed=1)
    errors = []
    for step in range(600):
        x = randn(64, 4, seed=step) @ directions
        out = boundary.send(x)
        errors.append(relative_error(out, x))
        boundary.send(out - x, "backward")
        boundary.end_step()
        boundary.stashes.clear()
    assert errors[0] > 0.5
    assert sum(errors[-20:]) / 20 < 1e-2


def test_is_adam():
    boundary = AutoencoderBoundary(width=3, lr=1e-2, dtype="fp32")
    boundary.send(randn(8, 16))
    weights = {w: boundary.entry(w).clone().requires_grad_() for w in ("encoder", "decoder")}
    adam = torch.optim.Adam(weights.values(), lr=1e-2, eps=1e-30)
    for step in range(5):
        boundary.send(randn(8, 16, seed=step))
        boundary.send(randn(8, 16, seed=50 + step), "backward")
        for name, weight in weights.items():
            weight.grad = boundary.entry(name, ".gradient").clone()
        adam.step()
        boundary.end_step()
        for name, weight in weights.items():
            torch.testing.assert_close(boundary.entry(name), weight.detach())


def test_replicas_average_their_gradients_and_stay_equal():
    replicas = [AutoencoderBoundary(replica=r, width=3, dtype="fp32") for r in range(2)]
    alone = AutoencoderBoundary(width=3, dtype="fp32")
    for step in range(3):
        for r, replica in enumerate(replicas):
            x, g = randn(8, 16, seed=2 * step + r), randn(8, 16, seed=100 + 2 * step + r)
            replica.send(x)
            replica.send(g, "backward")
            alone.send(x, micro_batch=r)
            alone.send(g, "backward", micro_batch=r)
        pairs = [
            [replica.entry(weight, ".gradient") for replica in replicas] for weight in ("encoder", "decoder")
        ]
        mean = {first.shape: (first + second) / 2 for first, second in pairs}
        order = []
        for replica in replicas:
            replica.end_step(lambda gradient: order.append(gradient.shape) or mean[gradient.shape])
        assert order == [(16, 3), (3, 16)] * 2
        alone.end_step(lambda gradient: gradient / 2)
        for weight in ("encoder", "decoder"):
            assert torch.equal(replicas[0].entry(weight), replicas[1].entry(weight))
            torch.testing.assert_close(replicas[0].entry(weight), alone.entry(weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_overflow_skips_the_update(bad):
    boundary, calm = AutoencoderBoundary(width=3), AutoencoderBoundary(width=3)
    for step in range(3):
        for b in (boundary, calm):
            b.send(randn(8, 16, seed=step))
            b.send(randn(8, 16, seed=50 + step), "backward")
            b.end_step()
        if step == 1:
            before = boundary.snapshot()
            g = randn(8, 16)
            g[2, 3] = bad
            boundary.send(randn(8, 16))
            boundary.send(g, "backward")
            boundary.end_step()
            assert same(boundary.memories, before)
    assert same(boundary.memories, calm.memories)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**16, 2.0**40])
def test_loss_scale_does_not_matter(scale):
    plain, scaled = AutoencoderBoundary(width=3), AutoencoderBoundary(width=3)
    for step in range(3):
        for boundary, factor in ((plain, 1.0), (scaled, scale)):
            boundary.send(randn(8, 16, seed=step))
            boundary.send(randn(8, 16, seed=50 + step) * factor, "backward")
            boundary.end_step()
    for weight in ("encoder", "decoder"):
        torch.testing.assert_close(scaled.entry(weight), plain.entry(weight))


def test_nothing_to_learn():
    """No backward message: no collective. A gradient of zero: no change of the weights."""
    boundary = AutoencoderBoundary(width=3)
    boundary.send(randn(8, 16))
    before = boundary.snapshot()

    def never(gradient):
        raise AssertionError("averaged without a gradient")

    boundary.end_step(never)
    assert same(boundary.memories, before)
    boundary.send(torch.zeros(8, 16), "backward")
    boundary.end_step()
    for weight in ("encoder", "decoder"):
        assert any(
            torch.equal(boundary.entry(weight), value) for memory in before for value in memory.values()
        )


def test_memory_entries_are_replaced_never_modified():
    boundary = AutoencoderBoundary(width=3)
    for _ in range(2):
        for micro_batch in range(2):
            boundary.send(randn(8, 16), micro_batch=micro_batch)
            kept = boundary.snapshot()
            copies = [{key: value.clone() for key, value in memory.items()} for memory in kept]
            boundary.send(randn(8, 16), "backward", micro_batch=micro_batch)
        boundary.end_step()
        assert same(kept, copies)
        assert not any(key.endswith(".gradient") for memory in boundary.memories for key in memory)
