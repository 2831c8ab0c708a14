"""autoencoder: its two layers are trained as Adam trains them, on every replica alike."""

import pytest
import torch

from tests.support.captured_messages import Boundary, randn, relative_error, same


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_learns_low_rank_data(wire):
    """The loss is half the squared error of what arrives, so the gradient is the error."""
    boundary = Boundary(width=4, lr=1e-2, dtype=wire)
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
    boundary = Boundary(width=3, lr=1e-2, dtype="fp32")
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
    replicas = [Boundary(replica=r, width=3, dtype="fp32") for r in range(2)]
    alone = Boundary(width=3, dtype="fp32")
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
    boundary, calm = Boundary(width=3), Boundary(width=3)
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
    plain, scaled = Boundary(width=3), Boundary(width=3)
    for step in range(3):
        for boundary, factor in ((plain, 1.0), (scaled, scale)):
            boundary.send(randn(8, 16, seed=step))
            boundary.send(randn(8, 16, seed=50 + step) * factor, "backward")
            boundary.end_step()
    for weight in ("encoder", "decoder"):
        torch.testing.assert_close(scaled.entry(weight), plain.entry(weight))


def test_nothing_to_learn():
    """No backward message: no collective. A gradient of zero: no change of the weights."""
    boundary = Boundary(width=3)
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
    boundary = Boundary(width=3)
    for _ in range(2):
        for micro_batch in range(2):
            boundary.send(randn(8, 16), micro_batch=micro_batch)
            kept = boundary.snapshot()
            copies = [{key: value.clone() for key, value in memory.items()} for memory in kept]
            boundary.send(randn(8, 16), "backward", micro_batch=micro_batch)
        boundary.end_step()
        assert same(kept, copies)
        assert not any(key.endswith(".gradient") for memory in boundary.memories for key in memory)
