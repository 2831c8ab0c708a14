"""lowrank and pca against float64 references."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.codecs.lowrank import principal_subspace
from ds_compress.codecs.reshape import boundary_noise
from ds_compress.errors import CompressionError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}


def send(codec, x, sender, receiver):
    """What arrives; the parts must be what `layout` says."""
    spec = TensorSpec.of(x)
    parts = codec.encode(x, sender)
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == codec.layout(spec)
    out = codec.decode(parts, spec, receiver)
    assert TensorSpec.of(out) == spec
    return out


def relative_error(out, x):
    return ((out.double() - x.double()).norm() / x.double().norm()).item()


def of_rank(rank, n, h, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, rank, generator=generator) @ torch.randn(rank, h, generator=generator)


def with_spectrum(decay, n, h, seed=0):
    """n x h matrix with singular values near 1, decay, decay^2, ..."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q
    return (torch.randn(n, h, generator=generator) * decay ** torch.arange(h)) @ v.T


class TestLowRank:
    @pytest.mark.parametrize("wire", ["bf16", "fp32"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rank", [1, 3, 8])
    def test_exact_up_to_its_rank(self, dtype, wire, rank):
        codec = build({"name": "lowrank", "rank": 8, "dtype": wire})
        x = of_rank(rank, 96, 64).view(2, 48, 64).to(dtype)
        sender, receiver = Context(), Context()
        for _ in range(2):
            out = send(codec, x, sender, receiver)
        # rounding to the message's own dtype has made its rank full
        tolerance = TOLERANCE["bf16"] if dtype in (torch.bfloat16, torch.float16) else TOLERANCE[wire]
        assert relative_error(out, x) < tolerance

    def test_is_powersgd(self):
        """Two messages against the power iteration in float64; only the span of each Q counts."""
        codec = build({"name": "lowrank", "rank": 4, "dtype": "fp32"})
        sender, receiver = Context(), Context()
        q = boundary_noise((40, 4), sender).double()
        for seed in range(2):
            x = with_spectrum(0.8, 60, 40, seed)
            p = torch.linalg.qr(x.double() @ q).Q
            q = x.double().T @ p
            out = send(codec, x, sender, receiver)
            torch.testing.assert_close(out.double(), p @ q.T, rtol=0, atol=1e-5)

    def test_warm_start_improves_to_the_best_approximation(self):
        codec = build({"name": "lowrank", "rank": 4, "dtype": "fp32"})
        x = with_spectrum(0.9, 128, 64)
        sender, receiver = Context(), Context()
        errors = [relative_error(send(codec, x, sender, receiver), x) for _ in range(30)]
        singular = torch.linalg.svdvals(x.double())
        best = (singular[4:].norm() / singular.norm()).item()
        assert errors[0] > 1.1 * best
        assert all(after < before + 1e-6 for before, after in pairwise(errors))
        assert errors[-1] < 1.005 * best
        assert not receiver.memory

    def test_directions_and_positions_have_their_own_start(self):
        codec = build({"name": "lowrank", "rank": 2})
        memory = {}
        x = of_rank(2, 32, 16)
        for direction in ("forward", "backward"):
            for position in (0, 1):
                codec.encode(x, Context(direction=direction, position=position, memory=memory))
        assert len(memory) == 4

    def test_first_message_does_not_depend_on_the_step(self):
        codec = build({"name": "lowrank", "rank": 2})
        x = with_spectrum(0.9, 32, 16)
        first, later = codec.encode(x, Context()), codec.encode(x, Context(step=7, micro_batch=3))
        assert all(torch.equal(a, b) for a, b in zip(first, later))

    @pytest.mark.parametrize(
        "shape, rank, expected",
        [
            ((100, 64), 8, ((100, 8), (64, 8))),
            ((5, 20, 64), 8, ((100, 8), (64, 8))),
            ((4, 1000), 3, ((4, 3), (1000, 3))),
            ((4, 1000), 4, ((4, 1000),)),  # 4 * 1004 numbers in the factors, 4000 in the message
            ((16, 16), 8, ((16, 16),)),
            ((64,), 8, ((1, 64),)),
            ((), 8, ((1, 1),)),
            ((0, 64), 8, ((0, 64),)),
            ((64, 0), 8, ((64, 0),)),
        ],
    )
    def test_never_more_numbers_than_the_message(self, shape, rank, expected):
        codec = build({"name": "lowrank", "rank": rank})
        assert tuple(part for part, _ in codec.layout(TensorSpec(shape, torch.float32))) == expected

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_non_finite_is_visible_and_leaves_the_memory(self, dtype, bad):
        codec = build({"name": "lowrank", "rank": 4})
        sender, receiver = Context(), Context()
        x = of_rank(4, 64, 32).to(dtype)
        x[:, 5] = 0  # Q has a zero row here
        for _ in range(2):
            send(codec, x, sender, receiver)
        before = dict(sender.memory)
        broken = x.clone()
        broken[3, 5] = bad
        assert not send(codec, broken, sender, receiver).isfinite().all()
        assert all(torch.equal(sender.memory[key], before[key]) for key in before)
        assert relative_error(send(codec, x, sender, receiver), x) < TOLERANCE["bf16"]

    def test_keeps_no_graph(self):
        codec = build({"name": "lowrank", "rank": 4})
        sender = Context()
        parts = codec.encode(of_rank(4, 64, 32).requires_grad_(), sender)
        assert sender.memory and not any(value.requires_grad for value in (*parts, *sender.memory.values()))

    @pytest.mark.parametrize("wire", ["bf16", "fp32"])
    @pytest.mark.parametrize("scale", [1e-30, 2.0**-90, 1e-10, 1e10, 1e30])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scale(self, dtype, scale, wire):
        codec = build({"name": "lowrank", "rank": 4, "dtype": wire})
        x = with_spectrum(0.7, 64, 32).to(dtype)
        plain, scaled = (Context(), Context()), (Context(), Context())
        for _ in range(3):
            expected = send(codec, x, *plain).double()
            out = send(codec, (x.double() * scale).to(dtype), *scaled).double() / scale
            assert relative_error(out, expected) < (
                1e-4 if dtype == torch.float32 and wire == "fp32" else 2e-2
            )

    def test_zero_is_exact_and_forgotten(self):
        codec = build({"name": "lowrank", "rank": 4})
        sender, receiver = Context(), Context()
        x = of_rank(4, 64, 32)
        send(codec, x, sender, receiver)
        before = dict(sender.memory)
        zero = torch.zeros_like(x)
        assert torch.equal(send(codec, zero, sender, receiver), zero)
        assert all(torch.equal(sender.memory[key], before[key]) for key in before)

    def test_constant(self):
        codec = build({"name": "lowrank", "rank": 4, "dtype": "fp32"})
        x = torch.full((3, 20, 32), -0.7)
        torch.testing.assert_close(send(codec, x, Context(), Context()), x)

    def test_memory_keeps_weak_directions(self):
        """Columns of Q' differ by the square of the singular values' ratio from message to message, 1e-10
        here."""
        codec = build({"name": "lowrank", "rank": 4, "dtype": "fp32"})
        generator = torch.Generator().manual_seed(0)
        u, v = (torch.linalg.qr(torch.randn(n, 4, generator=generator)).Q for n in (96, 48))
        x = (u * torch.tensor([1e5, 1e3, 10.0, 1.0])) @ v.T
        sender, receiver = Context(), Context()
        for _ in range(20):
            out = send(codec, x, sender, receiver)
        torch.testing.assert_close(u[:, 3] @ out @ v[:, 3], torch.tensor(1.0), rtol=0, atol=0.05)

    @settings(max_examples=40, deadline=None)
    @given(
        shape=st.lists(st.integers(0, 12), max_size=3),
        rank=st.integers(1, 20),
        dtype=st.sampled_from(DTYPES),
        wire=st.sampled_from(["bf16", "fp32"]),
        seed=st.integers(0, 99),
    )
    def test_any_shape(self, shape, rank, dtype, wire, seed):
        """Never worse than sending nothing, never in the way of the input, deterministic."""
        codec = build({"name": "lowrank", "rank": rank, "dtype": wire})
        x = torch.randn([*shape, 2], generator=torch.Generator().manual_seed(seed)).to(dtype)[
            ..., 0
        ]  # not contiguous
        before = x.clone()
        out = send(codec, x, Context(), Context())
        assert torch.equal(out, send(codec, x, Context(), Context()))
        assert torch.equal(x, before)
        assert (out - x).double().norm() <= 1.01 * x.double().norm()


def offset(rank, n, h, seed=0):
    """Rows in a subspace of `rank` dimensions, one of them their mean."""
    generator = torch.Generator().manual_seed(100 + seed)
    return of_rank(rank - 1, n, h, seed) + 3 * torch.randn(h, generator=generator)


def observed(codec, *tensors, **context):
    sides = Context(**context), Context(**context)
    for x in tensors:
        for side in sides:
            codec.observe(x, side)
    return sides


class TestPCA:
    @pytest.mark.parametrize("wire", ["bf16", "fp32"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_exact_in_a_subspace(self, dtype, wire):
        codec = build({"name": "pca", "rank": 5, "dtype": wire})
        both = offset(5, 300, 32)
        seen, new = both[:200].view(4, 50, 32), both[200:].view(2, 50, 32).to(dtype)
        out = send(codec, new, *observed(codec, *seen.to(dtype)))
        tolerance = TOLERANCE["bf16"] if dtype in (torch.bfloat16, torch.float16) else TOLERANCE[wire]
        assert relative_error(out, new) < tolerance

    @pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 1.0])
    def test_loses_no_more_than_the_eigenvectors(self, decay):
        x = (with_spectrum(decay, 400, 48) + 2.0).double()
        codec = build({"name": "pca", "rank": 6, "dtype": "fp32"})
        out = send(codec, x, *observed(codec, x[:150], x[150:]))
        _, v = torch.linalg.eigh(x.T @ x)
        best = x @ v[:, -6:] @ v[:, -6:].T
        assert (out - x).norm() < 1.01 * (best - x).norm() + 1e-6 * x.norm()

    def test_backward_is_the_derivative_of_forward(self):
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

    def test_both_sides_have_the_same_bits_and_drop_the_moment(self):
        codec = build({"name": "pca", "rank": 4})
        x = with_spectrum(0.9, 64, 16)
        sender, receiver = observed(codec, x)
        send(codec, x, sender, receiver)
        assert sorted(sender.memory) == ["pca.0.16.basis"]
        assert all(torch.equal(sender.memory[key], receiver.memory[key]) for key in sender.memory)

    def test_basis_stays(self):
        codec = build({"name": "pca", "rank": 4})
        sender, receiver = observed(codec, with_spectrum(0.9, 64, 16))
        send(codec, with_spectrum(0.9, 64, 16), sender, receiver)
        before = dict(sender.memory)
        codec.observe(with_spectrum(0.9, 64, 16, seed=1), sender)
        assert sender.memory == before

    @pytest.mark.parametrize("kind", ["spread", "equal", "too few", "constant", "outliers"])
    def test_basis_survives_another_order_of_summation(self, kind):
        """Moments that differ in the last bits, as from another kind of processor, move the basis by rounding
        only."""
        h, r = 48, 12
        generator = torch.Generator().manual_seed(0)
        x = {
            "spread": with_spectrum(0.9, 500, h),
            "equal": torch.linalg.qr(torch.randn(500, h, generator=generator)).Q,
            "too few": of_rank(5, 500, h),
            "constant": torch.full((500, h), 0.3),
            "outliers": with_spectrum(0.9, 500, h) * torch.where(torch.arange(h) < 3, 1000.0, 1.0),
        }[kind]
        moment = x.double().T @ x.double()
        noise = torch.randn(moment.shape, generator=generator, dtype=torch.float64) * moment.abs() * 1e-15
        start = torch.randn(h, r, generator=generator, dtype=torch.float64)
        basis = principal_subspace(moment, start)
        moved = principal_subspace(moment + noise + noise.T, start)
        torch.testing.assert_close(basis, moved, rtol=0, atol=1e-4)
        torch.testing.assert_close(basis.T @ basis, torch.eye(r, dtype=torch.float64))

    def test_refuses_without_warm_up(self):
        codec = build("pca")
        x = torch.randn(4, 8)
        sender = Context(boundary=3)
        codec.observe(x, Context(direction="backward", memory=sender.memory))
        with pytest.raises(CompressionError, match=r"^codec 'pca' at boundary 3: .*warmup_steps >= 1$"):
            codec.encode(x, sender)
        with pytest.raises(CompressionError, match="warmup_steps >= 1"):
            codec.decode((torch.zeros(4, 8, dtype=torch.bfloat16),), TensorSpec.of(x), Context())

    def test_keeps_no_graph(self):
        codec = build({"name": "pca", "rank": 3})
        x = offset(3, 64, 16).requires_grad_()
        sender, _ = observed(codec, x)
        assert not any(value.requires_grad for value in sender.memory.values())
        assert not codec.encode(x, sender)[0].requires_grad

    def test_non_finite_observation_is_left_out(self):
        codec = build({"name": "pca", "rank": 3, "dtype": "fp32"})
        x = offset(3, 64, 16)
        broken = x.clone()
        broken[0, 0] = float("inf")
        out = send(codec, x, *observed(codec, broken, x, broken))
        assert relative_error(out, x) < 1e-5

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    def test_non_finite_is_visible(self, bad, direction):
        codec = build({"name": "pca", "rank": 3})
        x = offset(3, 64, 16)
        x[:, 5] = 0  # this channel has no part in the basis
        sender, receiver = observed(codec, x)
        x[7, 5] = bad
        sides = [Context(direction=direction, memory=side.memory) for side in (sender, receiver)]
        assert not send(codec, x, *sides).isfinite().all()

    @pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
    def test_scale(self, scale):
        codec = build({"name": "pca", "rank": 6, "dtype": "fp32"})
        x = offset(12, 64, 32).double()
        expected = send(codec, x, *observed(codec, x))
        scaled = (x * scale).float()
        assert relative_error(send(codec, scaled, *observed(codec, scaled)).double() / scale, expected) < 1e-4

    @pytest.mark.parametrize("value", [0.0, -0.7])
    def test_constant(self, value):
        x = torch.full((3, 20, 32), value)
        codec = build({"name": "pca", "dtype": "fp32"})
        torch.testing.assert_close(send(codec, x, *observed(codec, x)), x)

    @settings(max_examples=40, deadline=None)
    @given(
        shape=st.lists(st.integers(0, 9), max_size=3),
        rank=st.integers(1, 12),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 99),
    )
    def test_any_shape(self, shape, rank, dtype, seed):
        """Fitted to the message itself: never worse than zeros, exact when the basis is as wide as a row."""
        codec = build({"name": "pca", "rank": rank, "dtype": "fp32"})
        x = torch.randn([*shape, 2], generator=torch.Generator().manual_seed(seed)).to(dtype)[
            ..., 0
        ]  # not contiguous
        out = send(codec, x, *observed(codec, x)).double()
        assert (out - x).norm() <= 1.01 * x.double().norm()
        if shape and rank >= shape[-1]:
            torch.testing.assert_close(out, x.double(), rtol=1e-2, atol=1e-2)
