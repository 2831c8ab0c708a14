"""Each recipe: golden vectors, what adds up, what mirrors; passes that do several steps change nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.config import Config
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels import native
from ds_compress.kernels.feedback.reference import decode_int8, encode_int8
from tests.support.codecs import DTYPES, INPUTS, SETTINGS, FourBits, Pair, assert_same_bits, topk

EF21 = [[4, 0, 0, 0], [1, 0, 0, 0], [1, 0, -3, 0]]
EF = [[4, 0, 0, 0], [0, 0, 4, 0], [0, 0, -3, 0]], [[0, 3, 2, 1], [1, 1, 0, 1], [1, 2, 0, 3]]
MIXED = [[4, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], [[0, 3, 2, 1], [1, 0, 4, 1], [1, 1, 0, 3]]


@pytest.mark.parametrize(
    "feedback, density, messages, states",
    [("ef", 0.25, *EF), ("ef21", 0.25, EF21, EF21), ("ef_mixed", 0.5, *MIXED)],
)
def test_golden(feedback, density, messages, states):
    pair = Pair(topk(density), feedback)
    for x, message, state in zip(INPUTS, messages, states):
        assert pair(x).tolist() == message and pair.state().tolist() == state


LAST = [0.0237, 0.0712, 0.0366, -0.0506]


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 6e-5), ("int8", 4e-3)])
def test_loco_golden(dtype, tolerance):
    feedback = FEEDBACKS.build({"name": "loco", "dtype": dtype}, "feedback")
    pair = Pair("none", "none")
    pair.codec = feedback.wrap(FourBits())
    residuals = [[0, 0.0286, 0.0571, -0.0286], [0.0237, 0.04, 0.0457, -0.0286], LAST]
    messages = [[4, 2.8571, 1.7143, 1.1429], [0.8816, -2.0571, 2.0571, 0], [0, 0.8441, -2.9543, 2.1102]]
    # 3.5 steps of 4/7 lie between two codes: the golden vector's arithmetic took the lower one
    inputs = INPUTS.clone()
    inputs[0, 2] -= 1e-6
    for x, message, residual in zip(inputs, messages, residuals):
        torch.testing.assert_close(pair(x), torch.tensor(message), atol=tolerance, rtol=0)
        state = pair.state() if dtype == "fp32" else decode_int8(*pair.sender.values())
        torch.testing.assert_close(state, torch.tensor(residual), atol=tolerance, rtol=0)


DITHERED = [{"name": "quantize", "bits": 3, "group_size": 8, "rounding": "dither"}]
DITHERED += [{"name": "entropy", "bits": 2, "rounding": "dither"}]
"""Receivers draw what senders drew, wherever a feedback encodes and decodes."""


@pytest.mark.parametrize("codec", [*SETTINGS, *DITHERED], ids=str)
@pytest.mark.parametrize("feedback", ["ef", "ef_mixed"])
@pytest.mark.parametrize("scope", ["boundary", "micro_batch"])
def test_what_was_sent_and_what_is_left_add_up(codec, feedback, scope):
    """The sum of the messages is the sum of the inputs minus the residuals, in float64."""
    torch.manual_seed(0)
    pair = Pair(codec, {"name": feedback, "scope": scope})
    inputs = torch.randn(40, 3, 17, dtype=torch.float64) + 0.5
    sent = sum(pair(x, micro_batch=i % 4) for i, x in enumerate(inputs))
    left = sum(pair.sender.values())
    assert len(pair.sender) == (4 if scope == "micro_batch" else 1) and not pair.receiver
    torch.testing.assert_close(sent + left, inputs.sum(0), atol=1e-12, rtol=1e-12)
    assert left.abs().max() > 1e-3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.floats(0.01, 1), st.sampled_from([1e-30, 1.0, 1e30]))
def test_ef21_of_a_constant_is_exact_after_all_entries_were_sent(numel, density, size):
    pair = Pair(topk(density), "ef21")
    x = size * torch.randn(numel)
    kept = pair.codec.codec.kept(TensorSpec.of(x))
    for _ in range(-(-numel // kept)):
        arrived = pair(x)
    assert torch.equal(arrived, x)


def test_ef21_sides_stay_equal():
    torch.manual_seed(0)
    for codec in (*SETTINGS, *DITHERED):
        for dtype in ("fp32", "bf16"):
            pair = Pair(codec, {"name": "ef21", "dtype": dtype, "scope": "micro_batch"})
            for i in range(20):
                pair(torch.randn(4, 9, dtype=torch.bfloat16 if i % 2 else torch.float32), micro_batch=i % 3)
            assert pair.in_step() and len(pair.sender) == 3


def test_residuals_of_bf16_messages_keep_what_bf16_rounds_away():
    pair = Pair("none", "ef")
    x = torch.full((8,), 1.0, dtype=torch.bfloat16)
    tiny = torch.full((8,), 2.0**-12, dtype=torch.bfloat16)
    pair.sender["forward/sender/ef"] = tiny.float()
    assert torch.equal(pair(x), x)
    assert torch.equal(pair.state(), tiny.float())


def test_warm_up_primes_ef21_and_leaves_ef_at_zero():
    x = torch.randn(3, 20)
    for feedback in ("ef", "ef_mixed", "loco"):
        pair = Pair(topk(0.1), feedback)
        pair.observe(x)
        assert not pair.sender and not pair.receiver
    pair = Pair(topk(0.1), "ef21")
    pair.observe(torch.randn(3, 20))
    pair.observe(4 * x, loss_scale=4.0)
    pair.observe(torch.full_like(x, torch.nan))
    assert torch.equal(pair.state(), x) and torch.equal(pair.state(pair.receiver), x)
    assert torch.equal(pair(x), x)


def test_loco_starts_again():
    x = torch.randn(20)
    pair = Pair(topk(0.1), {"name": "loco", "reset_every": 4})
    fresh = pair(x, step=0)
    later = [pair(x, step=step, micro_batch=m) for step, m in ((1, 0), (2, 0), (3, 0), (4, 0))]
    assert torch.equal(later[-1], fresh) and not torch.equal(later[1], fresh)
    assert not torch.equal(pair(x, step=4, micro_batch=1), fresh)
    pair = Pair(topk(0.1), {"name": "loco", "reset_every": 4, "scope": "micro_batch"})
    sent = [pair(x, step=step, micro_batch=1) for step in range(5)]
    assert torch.equal(sent[4], sent[0]), "with a buffer each, the others start again too"


def test_gradients_return_at_the_entries_that_were_sent():
    """Index reuse follows the mask of the message, C(x + e) or C(x - A), and works under a feedback."""
    for forward, backward in [("ef", "ef"), ("ef21", "ef21"), ("ef_mixed", "none"), ("loco", "ef")]:
        reuse = {"codec": {"name": "topk", "indices": "reuse"}, "feedback": backward}
        config = Config({"forward": {"codec": topk(0.3), "feedback": forward}, "backward": reuse})
        codecs = config.in_force.codecs(None)
        memories = {}, {}
        torch.manual_seed(0)
        for step in range(4):
            x, g = torch.randn(2, 3, 20)
            contexts = [Context(step=step, memory=memory) for memory in memories]
            parts = codecs.forward.encode(x, contexts[0])
            codecs.forward.decode(parts, TensorSpec.of(x), contexts[1])
            assert torch.equal(contexts[0].selection.indices, contexts[1].selection.indices)
            mask = torch.zeros(60, dtype=torch.bool)
            mask[contexts[0].selection.indices] = True
            for ctx in contexts:
                ctx.direction = "backward"
            parts = codecs.backward.encode(g, contexts[1])
            arrived = codecs.backward.decode(parts, TensorSpec.of(g), contexts[0])
            if backward == "none":
                assert torch.equal(arrived.flatten(), torch.where(mask, g.flatten(), 0.0))
            elif step == 0:
                assert torch.equal(arrived.flatten() != 0, mask)


def test_both_parts_of_ef_mixed_draw_entries_of_their_own():
    pair = Pair({"name": "randomk", "density": 0.5}, {"name": "ef_mixed", "split": 0.25})
    ctx = Context(memory={"forward/sender/ef_mixed": torch.randn(1, 400)})
    pair.codec.encode(torch.randn(1, 400), ctx)
    assert ctx.selection.count == 200 and 110 < len(ctx.selection.indices.unique()) < 200


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 700), st.sampled_from([1e-30, 1.0, 1e30]))
def test_int8_store(numel, size):
    value = size * torch.randn(numel)
    codes, scales = encode_int8(value)
    step = scales.repeat_interleave(128)[:numel]
    assert codes.shape == value.shape and scales.numel() == -(-numel // 128)
    assert ((decode_int8(codes, scales) - value).abs() <= 0.501 * step).all()
    assert not decode_int8(*encode_int8(torch.zeros(numel))).any()


FEEDBACK = [
    "ef",
    {"name": "ef", "decay": 0.5, "dtype": "bf16"},
    {"name": "ef", "dtype": "int8"},
    "ef21",
    {"name": "ef21", "dtype": "bf16"},
    {"name": "loco", "reset_every": 3},
    {"name": "loco", "beta": 0.0, "dtype": "fp32"},
]
OPTIONS = [{"bits": 8, "group_size": 64}, {"rounding": "stochastic"}]
OPTIONS += [{"bits": bits, "hadamard": bits < 4} for bits in (2, 3, 4)]


def assert_alike(one, other, messages, **place):
    """Two pairs send the same bits of each two messages, decode them alike and keep the same of them."""
    for step, both in enumerate(messages):
        ours, theirs = (
            [pair(x, step=step, **place), *pair.parts, *pair.sender.values(), *pair.receiver.values()]
            for pair, x in zip((one, other), both)
        )
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("feedback", FEEDBACK, ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 37), (64, 96)], ids=str)
def test_passes_of_a_codec_change_nothing(feedback, options, dtype, shape, monkeypatch):
    monkeypatch.setattr(native, "LONG", 0)
    for loss_scale in (1.0, 1000.0):
        fused, in_steps = (Pair({"name": "quantize", **options}, feedback) for _ in range(2))
        in_steps.codec._fused = None
        assert fused.codec._fused is fused.codec.codec
        messages = torch.randn(4, *shape).to(dtype)
        assert_alike(fused, in_steps, zip(messages, messages), loss_scale=loss_scale)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_who_holds_a_copy_of_the_memory_keeps_what_was_there(feedback, monkeypatch):
    """The next state reuses the memory of the old one, unless another trial of settings holds it too."""
    monkeypatch.setattr(native, "LONG", 0)
    codec = FEEDBACKS.build(feedback, "feedback").wrap(build("quantize"))
    sender, receiver = {}, {}
    for step in range(3):
        x = torch.randn((64, 128), generator=torch.Generator().manual_seed(step))
        aside = dict(sender), dict(receiver)
        before = [{key: value.clone() for key, value in memory.items()} for memory in aside]
        parts = codec.encode(x, Context(step=step, memory=sender))
        arrived = codec.decode(parts, TensorSpec.of(x), Context(step=step, memory=receiver))
        for memory, old in zip(aside, before):
            assert memory.keys() == old.keys()
            assert_same_bits(memory.values(), old.values())
        again = codec.encode(x, Context(step=step, memory=aside[0]))
        assert_same_bits(again, parts)
        delivered = codec.decode(parts, TensorSpec.of(x), Context(step=step, memory=aside[1]))
        assert_same_bits([delivered, *aside[0].values()], [arrived, *sender.values()])


@pytest.mark.parametrize("long", [0, 1 << 62], ids=["C++", "torch"])
@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_messages_that_are_not_contiguous(feedback, long, monkeypatch):
    """ef21 took them for rows where C++ does not serve."""
    monkeypatch.setattr(native, "LONG", long)
    turned, plain = Pair("quantize", feedback), Pair("quantize", feedback)
    assert_alike(turned, plain, ((x, x.contiguous()) for x in torch.randn(3, 16, 8, 256).transpose(1, 2)))
