"""pca against float64 references."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from tests.support.codecs import DTYPES, TOLERANCE, observed, relative_error, send
from tests.support.messages import low_rank_matrix, with_spectrum


def offset(rank, n, h, seed=0):
    """Rows in a subspace of `rank` dimensions, one of them their mean."""
    generator = torch.Generator().manual_seed(100 + seed)
    return low_rank_matrix(rank - 1, n, h, seed) + 3 * torch.randn(h, generator=generator)


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_in_a_subspace(dtype, wire):
    codec = build({"name": "pca", "rank": 5, "dtype": wire})
    both = offset(5, 300, 32)
    seen, new = both[:200].view(4, 50, 32), both[200:].view(2, 50, 32).to(dtype)
    out = send(codec, new, *observed(codec, *seen.to(dtype)))
    tolerance = TOLERANCE["bf16"] if dtype in (torch.bfloat16, torch.float16) else TOLERANCE[wire]
    assert relative_error(out, new) < tolerance


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 1.0])
def test_loses_no_more_than_the_eigenvectors(decay):
    x = (with_spectrum(decay, 400, 48) + 2.0).double()
    codec = build({"name": "pca", "rank": 6, "dtype": "fp32"})
    out = send(codec, x, *observed(codec, x[:150], x[150:]))
    _, v = torch.linalg.eigh(x.T @ x)
    best = x @ v[:, -6:] @ v[:, -6:].T
    assert (out - x).norm() < 1.01 * (best - x).norm() + 1e-6 * x.norm()


def test_backward_is_the_derivative_of_forward():
    codec = build({"name": "pca", "rank": 6, "dtype": "fp32"})
    x = offset(10, 100, 24).double()
    sender, receiver = observed(codec, x)
    send(codec, x, sender, receiver)
    g = torch.randn(100, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    back = [Context(direction="backward", memory=side.memory) for side in (receiver, sender)]
    out = send(codec, g, *back)
    # the forward map is linear: it is its own derivative
    torch.testing.assert_close(out, send(codec, g, sender, receiver), rtol=0, atol=1e-4)
    assert relative_error(out, g) > 0.5


def test_both_sides_have_the_same_bits_and_drop_the_moment():
    codec = build({"name": "pca", "rank": 4})
    x = with_spectrum(0.9, 64, 16)
    sender, receiver = observed(codec, x)
    send(codec, x, sender, receiver)
    assert sorted(sender.memory) == ["pca.0.16.basis"]
    assert all(torch.equal(sender.memory[key], receiver.memory[key]) for key in sender.memory)


def test_basis_stays():
    codec = build({"name": "pca", "rank": 4})
    sender, receiver = observed(codec, with_spectrum(0.9, 64, 16))
    send(codec, with_spectrum(0.9, 64, 16), sender, receiver)
    before = dict(sender.memory)
    codec.observe(with_spectrum(0.9, 64, 16, seed=1), sender)
    assert sender.memory == before


def test_refuses_without_warm_up():
    codec = build("pca")
    x = torch.randn(4, 8)
    sender = Context(boundary=3)
    codec.observe(x, Context(direction="backward", memory=sender.memory))
    with pytest.raises(CompressionError, match=r"^codec 'pca' at boundary 3: .*warmup_steps >= 1$"):
        codec.encode(x, sender)
    with pytest.raises(CompressionError, match="warmup_steps >= 1"):
        codec.decode((torch.zeros(4, 8, dtype=torch.bfloat16),), TensorSpec.of(x), Context())


def test_non_finite_observation_is_left_out():
    codec = build({"name": "pca", "rank": 3, "dtype": "fp32"})
    x = offset(3, 64, 16)
    broken = x.clone()
    broken[0, 0] = float("inf")
    out = send(codec, x, *observed(codec, broken, x, broken))
    assert relative_error(out, x) < 1e-5


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_non_finite_is_visible(bad, direction):
    codec = build({"name": "pca", "rank": 3})
    x = offset(3, 64, 16)
    x[:, 5] = 0  # this channel has no part in the basis
    sender, receiver = observed(codec, x)
    x[7, 5] = bad
    sides = [Context(direction=direction, memory=side.memory) for side in (sender, receiver)]
    assert not send(codec, x, *sides).isfinite().all()
