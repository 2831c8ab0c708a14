"""autoencoder: two linear layers whose gradients cross the boundary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from tests.support.captured_messages import Boundary, randn, relative_error
from tests.support.matrices import any_shape


@pytest.mark.parametrize(
    "dtype, wire, tolerance",
    [(torch.float64, "fp32", 1e-5), (torch.float32, "bf16", 1e-2), (torch.bfloat16, "bf16", 2e-2)],
)
def test_messages_and_gradients_are_those_of_two_linear_layers(dtype, wire, tolerance):
    boundary = Boundary(width=5, dtype=wire)
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
        Boundary(seed=3, width=4, dtype="fp32"),
        Boundary(seed=3, replica=5, width=4, dtype="fp32"),
    )
    out = first.send(x)
    torch.testing.assert_close(first.send(out, micro_batch=1), out)  # a projection
    second.send(x, micro_batch=7)
    e = first.entry("encoder")
    torch.testing.assert_close(e.T @ e, torch.eye(4))
    assert torch.equal(e, second.entry("encoder")) and torch.equal(e.T, first.entry("decoder"))
    other = Boundary(seed=4, width=4)
    other.send(x)
    assert not torch.equal(e, other.entry("encoder"))


def test_keeps_no_graph():
    """A stage sends its output with the graph that made it."""
    boundary = Boundary(width=3)
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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_non_finite_is_visible(bad, direction):
    boundary = Boundary(width=3)
    boundary.send(randn(8, 16))
    x = randn(8, 16)
    x[2, 3] = bad
    assert not boundary.send(x, direction).isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale(dtype, scale):
    x = randn(8, 16).to(dtype)
    expected = Boundary(width=3).send(x).double()
    out = Boundary(width=3).send((x.double() * scale).to(dtype)).double() / scale
    assert relative_error(out, expected) < 2e-2


@settings(max_examples=40, deadline=None)
@given(x=any_shape(), width=st.integers(1, 12))
def test_any_shape(x, width):
    boundary = Boundary(width=width, dtype="fp32")
    before = x.clone()
    out = boundary.send(x)
    if x.numel() and width >= (x.shape[-1] if x.shape else 1):
        torch.testing.assert_close(out, x, rtol=1e-2, atol=1e-2)
    boundary.send(out - x, "backward")
    boundary.end_step()
    assert torch.equal(x, before)
    assert all(value.isfinite().all() for memory in boundary.memories for value in memory.values())
