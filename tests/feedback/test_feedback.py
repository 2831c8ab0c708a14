"""What each feedback promises: golden vectors, conservation, mirrored state, and silence in evaluation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import Codec, CodecOptions, Context, TensorSpec, build
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS
from ds_compress.feedback.state import int8_decode, int8_encode

INPUTS = torch.tensor([[4.0, 3, 2, 1], [1, -2, 2, 0], [0, 1, -3, 2]])


def topk(density, rows="tensor"):
    return {"name": "topk", "density": density, "rows": rows}


class Pair:
    """Sender and receiver of one channel, each with a memory of its own."""

    def __init__(self, codec, feedback, direction="forward"):
        self.codec = FEEDBACKS.build(feedback, "feedback").around(build(codec))
        self.direction = direction
        self.sender, self.receiver = {}, {}
        self.sent = 0

    def _contexts(self, changes):
        place = {"direction": self.direction, "step": self.sent, **changes}
        self.sent += 1
        return Context(memory=self.sender, **place), Context(memory=self.receiver, **place)

    def __call__(self, x, **changes):
        """What the receiver gets for `x`."""
        sender, receiver = self._contexts(changes)
        before = x.clone()
        parts = self.codec.encode(x, sender)
        assert torch.equal(x, before) or not x.isfinite().all()
        assert tuple((tuple(p.shape), p.dtype) for p in parts) == self.codec.layout(TensorSpec.of(x))
        decoded = self.codec.decode(tuple(p.clone() for p in parts), TensorSpec.of(x), receiver)
        assert decoded.dtype == x.dtype and decoded.shape == x.shape
        return decoded

    def observe(self, x, **changes):
        for ctx in self._contexts(changes):
            self.codec.observe(x, ctx)

    def state(self, memory=None):
        (value,) = (self.sender if memory is None else memory).values()
        return value


class FourBits(Codec):
    """The quantizer of LoCo's golden vector: symmetric, one scale for the tensor, integer steps of max /
    7."""

    Options = CodecOptions
    name = "four_bits"

    def layout(self, spec):
        return ((spec.shape, torch.int8), ((), torch.float32))

    def encode(self, x, ctx):
        scale = x.abs().max() / 7
        return (x / scale).round().to(torch.int8), scale

    def decode(self, parts, spec, ctx):
        codes, scale = parts
        return codes * scale


def golden(pair):
    messages, states = [], []
    for x in INPUTS:
        messages.append(pair(x).tolist())
        states.append(pair.state().tolist())
    return messages, states


def test_ef_golden():
    messages, states = golden(Pair(topk(0.25), "ef"))
    assert messages == [[4, 0, 0, 0], [0, 0, 4, 0], [0, 0, -3, 0]]
    assert states == [[0, 3, 2, 1], [1, 1, 0, 1], [1, 2, 0, 3]]


def test_ef21_golden():
    messages, states = golden(Pair(topk(0.25), "ef21"))
    assert messages == states == [[4, 0, 0, 0], [1, 0, 0, 0], [1, 0, -3, 0]]


def test_ef_mixed_golden():
    messages, states = golden(Pair(topk(0.5), "ef_mixed"))
    assert messages == [[4, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert states == [[0, 3, 2, 1], [1, 0, 4, 1], [1, 1, 0, 3]]


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 6e-5), ("int8", 4e-3)])
def test_loco_golden(dtype, tolerance):
    feedback = FEEDBACKS.build({"name": "loco", "dtype": dtype}, "feedback")
    pair = Pair("none", "none")
    pair.codec = feedback.around(FourBits())
    residuals = [
        [0, 0.0286, 0.0571, -0.0286],
        [0.0237, 0.04, 0.0457, -0.0286],
        [0.0237, 0.0712, 0.0366, -0.0506],
    ]
    messages = [[4, 2.8571, 1.7143, 1.1429], [0.8816, -2.0571, 2.0571, 0], [0, 0.8441, -2.9543, 2.1102]]
    # 3.5 steps of 4/7 lie between two codes: the golden vector's arithmetic took the lower one
    inputs = INPUTS.clone()
    inputs[0, 2] -= 1e-6
    for x, message, residual in zip(inputs, messages, residuals):
        torch.testing.assert_close(pair(x), torch.tensor(message), atol=tolerance, rtol=0)
        state = pair.state() if dtype == "fp32" else int8_decode(*pair.sender.values())
        torch.testing.assert_close(state, torch.tensor(residual), atol=tolerance, rtol=0)


CODECS = [topk(0.3), topk(0.3, "sample"), {"name": "quantize", "bits": 3, "group_size": 8}, "bf16"]
ids = [str(c if isinstance(c, str) else c["name"]) + str(i) for i, c in enumerate(CODECS)]


@pytest.mark.parametrize("codec", CODECS, ids=ids)
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
    kept = pair.codec.kept(TensorSpec.of(x))
    for _ in range(-(-numel // kept)):
        arrived = pair(x)
    assert torch.equal(arrived, x)


def test_ef21_sides_stay_equal():
    torch.manual_seed(0)
    for codec in CODECS:
        for dtype in ("fp32", "bf16"):
            pair = Pair(codec, {"name": "ef21", "dtype": dtype, "scope": "micro_batch"})
            for i in range(50):
                pair(torch.randn(4, 9, dtype=torch.bfloat16 if i % 2 else torch.float32), micro_batch=i % 3)
            assert pair.sender.keys() == pair.receiver.keys() and len(pair.sender) == 3
            assert all(torch.equal(pair.sender[key], pair.receiver[key]) for key in pair.sender)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco"])
def test_the_mean_of_the_messages_approaches_a_repeated_input(feedback):
    """Plain top-k never sends the small entries; with feedback the mean of the messages approaches the
    input."""
    x = torch.arange(1.0, 11)
    pair = Pair(topk(0.3), feedback)
    mean = sum(pair(x) for _ in range(300)) / 300
    assert (mean - x).norm() / x.norm() < 0.05
    plain = build(topk(0.3))
    assert (plain.decode(plain.encode(x, Context()), TensorSpec.of(x), Context()) - x).norm() / x.norm() > 0.5


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco"])
def test_evaluation_is_the_plain_codec_and_leaves_no_trace(feedback):
    pair = Pair(topk(0.4), feedback)
    pair(torch.randn(10))
    before = [{key: value.clone() for key, value in side.items()} for side in (pair.sender, pair.receiver)]
    x = torch.randn(10)
    plain = build(topk(0.4))
    expected = plain.decode(plain.encode(x, Context()), TensorSpec.of(x), Context())
    assert torch.equal(pair(x, training=False), expected)
    for side, old in zip((pair.sender, pair.receiver), before):
        assert side.keys() == old.keys() and all(torch.equal(side[key], old[key]) for key in old)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("codec", CODECS, ids=ids)
def test_a_message_that_is_not_finite_is_seen_and_forgotten(codec, feedback, bad):
    torch.manual_seed(0)
    disturbed, calm = Pair(codec, feedback), Pair(codec, feedback)
    first, second = torch.randn(2, 3, 20)
    assert torch.equal(disturbed(first, step=1), calm(first, step=1))
    broken = torch.randn(3, 20)
    broken[1, 7] = bad
    assert not disturbed(broken, step=2).isfinite().all()
    assert torch.equal(disturbed(second, step=3), calm(second, step=3))
    assert all(torch.equal(disturbed.sender[key], calm.sender[key]) for key in calm.sender)
    assert all(torch.equal(disturbed.receiver[key], calm.receiver[key]) for key in calm.receiver)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco"])
def test_the_loss_scale_does_not_matter(feedback):
    """Gradients times a power of two give messages times that power, also when it changes between them."""
    torch.manual_seed(0)
    scaled, plain = Pair(topk(0.3), feedback, "backward"), Pair(topk(0.3), feedback, "backward")
    for step, scale in enumerate([1024.0, 1024.0, 512.0, 64.0, 65536.0]):
        x = torch.randn(3, 20)
        assert torch.equal(scaled(x * scale, loss_scale=scale, step=step), plain(x, step=step) * scale)


def test_sums_beyond_fp16_saturate():
    """Two finite messages whose sum or difference fp16 cannot hold must not look like an overflow."""
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    for feedback in ("ef", "ef21", "loco", "ef_mixed"):
        pair = Pair(topk(0.25), feedback)
        for sign in (1, 1, -1, 1, -1, -1, 1):
            assert pair(sign * x).isfinite().all()


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
    pair.observe(x)
    pair.observe(torch.full_like(x, torch.nan))
    assert torch.equal(pair.state(), x) and torch.equal(pair.state(pair.receiver), x)
    assert torch.equal(pair(x), x)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco"])
def test_messages_of_another_shape(feedback, caplog):
    """Alternating shapes: kept apart as if each had a channel of its own, or begun anew each time and
    said."""
    shapes = [(4, 6), (2, 6), (4, 6), (2, 6)]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    kept = Pair(topk(0.3), {"name": feedback, "on_new_shape": "keep"})
    alone = {shape: Pair(topk(0.3), feedback) for shape in shapes}
    for x in inputs:
        assert torch.equal(kept(x, step=1), alone[tuple(x.shape)](x, step=1))
    assert not caplog.records
    anew = Pair(topk(0.3), feedback)
    for x in inputs:
        assert torch.equal(anew(x, step=1), Pair(topk(0.3), feedback)(x, step=1))
    assert "shape [2, 6] instead of [4, 6]; its state starts from zero" in caplog.text


def test_loco_starts_again():
    x = torch.randn(20)
    pair = Pair(topk(0.1), {"name": "loco", "reset_every": 4})
    fresh = pair(x, step=0)
    later = [pair(x, step=step, micro_batch=m) for step, m in ((1, 0), (2, 0), (3, 0), (4, 0))]
    assert torch.equal(later[-1], fresh) and not torch.equal(later[1], fresh)
    assert not torch.equal(pair(x, step=4, micro_batch=1), fresh)


def test_gradients_return_at_the_entries_that_were_sent():
    """Index reuse follows the mask of the message, C(x + e) or C(x - A), and works under a feedback of its
    own."""
    for forward, backward in [("ef", "ef"), ("ef21", "ef21"), ("ef_mixed", "none"), ("loco", "ef")]:
        config = Config(
            {
                "forward": {"codec": topk(0.3), "feedback": forward},
                "backward": {"codec": {"name": "topk", "indices": "reuse"}, "feedback": backward},
            }
        )
        codecs = config.codecs(None)
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


class Turns(FourBits):
    """Both sides count the messages in their memory, and every other one is sent negated."""

    name = "turns"

    def layout(self, spec):
        return ((spec.shape, spec.dtype),)

    def _turn(self, ctx):
        ctx.memory["turns"] = ctx.memory.get("turns", torch.zeros(())) + 1
        return 2 * (ctx.memory["turns"] % 2) - 1

    def encode(self, x, ctx):
        return (x * self._turn(ctx),)

    def decode(self, parts, spec, ctx):
        return parts[0] * self._turn(ctx)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_the_sender_decodes_as_the_receiver_does(feedback):
    """Also where both change their memory with every message: the sender's own decoding must not count."""
    pair = Pair("none", "none")
    pair.codec = FEEDBACKS.build(feedback, "feedback").around(Turns())
    for x in torch.randn(5, 20):
        assert torch.allclose(pair(x), x)
    assert pair.sender["turns"] == pair.receiver["turns"] == 5


def test_both_parts_of_ef_mixed_draw_entries_of_their_own():
    pair = Pair({"name": "randomk", "density": 0.5}, "ef_mixed")
    ctx = Context(memory={"forward/sender/ef_mixed": torch.randn(1, 400)})
    pair.codec.encode(torch.randn(1, 400), ctx)
    assert ctx.selection.count == 200 and 110 < len(ctx.selection.indices.unique()) < 200


def test_settings_and_name_show_the_feedback():
    config = Config({"forward": {"codec": "bf16", "feedback": {"name": "ef", "scope": "micro_batch"}}})
    codecs = config.codecs(None)
    assert codecs.settings["forward"]["feedback"]["scope"] == "micro_batch"
    assert codecs.settings["forward"]["name"] == "bf16"
    assert str(codecs.forward) == "bf16 + ef(scope=micro_batch)"
    assert "feedback" not in codecs.settings["backward"]


def test_refusals():
    with pytest.raises(CompressionError, match="forward.feedback.scope: 'sample' is not allowed"):
        Config({"forward": {"feedback": {"name": "ef", "scope": "sample"}}})
    reuse = {"codec": {"name": "topk", "indices": "reuse"}, "feedback": "ef_mixed"}
    with pytest.raises(CompressionError, match="backward.feedback: 'ef_mixed' cannot split"):
        Config({"forward": {"codec": "topk"}, "backward": reuse})
    with pytest.raises(CompressionError, match="'ef' cannot follow codec 'secret'"):
        FEEDBACKS.build("ef", "feedback").around(Secret())


class Secret(FourBits):
    """Only the receiver has the key."""

    name = "secret"
    sender_decodes = False


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 700), st.sampled_from([1e-30, 1.0, 1e30]))
def test_int8_store(numel, size):
    value = size * torch.randn(numel)
    codes, scales = int8_encode(value)
    step = scales.repeat_interleave(128)[:numel]
    assert codes.shape == value.shape and scales.numel() == -(-numel // 128)
    assert ((int8_decode(codes, scales) - value).abs() <= 0.501 * step).all()
    assert not int8_decode(*int8_encode(torch.zeros(numel))).any()


AQ = {"name": "aqsgd", "dtype": "fp32"}


def ids(*numbers):
    return torch.tensor(numbers)


class AQPair(Pair):
    """Gives the receiver what a second packet would hold, and counts its rows."""

    dense = 0

    def __call__(self, x, **changes):
        sender, receiver = self._contexts(changes)
        spec = TensorSpec.of(x)
        parts = self.codec.encode(x, sender)
        split = len(self.codec.layout(spec))
        rest = self.codec.rest(parts[:split], spec)
        assert tuple((tuple(part.shape), part.dtype) for part in parts) == self.codec.layout(spec) + rest
        self.dense += sum(part.shape[0] for part in parts[split:])
        return self.codec.decode(tuple(part.clone() for part in parts), spec, receiver)

    def state_of(self, number):
        (row,) = (value for key, value in self.sender.items() if key.endswith(f"{number:016x}"))
        return row

    def in_step(self):
        return self.sender.keys() == self.receiver.keys() and all(
            torch.equal(self.sender[key], self.receiver[key]) for key in self.sender
        )


def test_aqsgd_golden():
    pair = AQPair(topk(0.25), AQ)
    messages = [pair(x[None], sample_ids=ids(-5))[0].tolist() for x in INPUTS]
    assert messages == [[4, 3, 2, 1], [4, -2, 2, 1], [4, -2, -3, 1]]
    assert pair.state().tolist() == [4, -2, -3, 1] and pair.in_step() and pair.dense == 1


def test_aqsgd_keeps_samples_apart():
    """However samples are mixed into micro-batches, each row is what a channel for that sample alone would
    give."""
    torch.manual_seed(0)
    codec = topk(0.25, "sample")
    together = AQPair(codec, AQ)
    alone = [AQPair(codec, AQ) for _ in range(6)]
    for visit in ([0, 1, 2], [3, 1, 4], [5, 0, 3], [2, 1, 0], [5, 4, 3]):
        x = torch.randn(3, 12)
        arrived = together(x, sample_ids=ids(*visit))
        for row, out, number in zip(x, arrived, visit):
            assert torch.equal(out, alone[number](row[None], sample_ids=ids(number))[0])
    assert together.dense == 6 and len(together.sender) == 6 and together.in_step()


@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_aqsgd_stores_are_alike(store, dtype, tmp_path):
    options = {"name": "aqsgd", "store": store, "dtype": dtype, "folder": str(tmp_path)}
    pair, plain = AQPair(topk(0.25), options), AQPair(topk(0.25), {**AQ, "dtype": dtype})
    torch.manual_seed(0)
    for _ in range(4):
        for first in range(0, 8, 2):
            x = torch.randn(2, 3, 5)
            assert torch.equal(
                pair(x, sample_ids=ids(first, first + 1)), plain(x, sample_ids=ids(first, first + 1))
            )
    assert [*pair.sender.values()][0].dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert sum(row.nbytes for row in pair.sender.values()) == 8 * 15 * (4 if dtype == "fp32" else 2)
    assert pair.in_step() and not list(tmp_path.iterdir())


def test_aqsgd_rows_on_disk_are_never_overwritten_under_a_reader(monkeypatch):
    monkeypatch.setattr("ds_compress.feedback.sample_store.ROWS_PER_FILE", 2)
    pair = AQPair(topk(0.25), {**AQ, "store": "disk"})
    x = torch.randn(2, 8)
    pair(x, sample_ids=ids(1, 2))
    held = dict(pair.sender)
    before = {key: row.clone() for key, row in held.items()}
    for _ in range(5):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2))
    assert all(torch.equal(held[key], before[key]) for key in held)
    assert not any(torch.equal(held[key], pair.sender[key]) for key in held)


def test_aqsgd_duplicates_and_batches():
    torch.manual_seed(0)
    twice = AQPair(topk(0.25, "sample"), AQ)
    for _ in range(5):
        twice(torch.randn(3, 8), sample_ids=ids(7, 7, 9))
    assert len(twice.sender) == 2 and twice.in_step()
    batch = AQPair(topk(0.25, "sample"), {**AQ, "scope": "micro_batch"})
    for _ in range(3):
        batch(torch.randn(3, 8), sample_ids=ids(1))
    assert batch.state().shape == (3, 8) and batch.in_step() and batch.dense == 1


def test_aqsgd_counts_samples_in_any_dimension():
    torch.manual_seed(0)
    pair, turned = AQPair(topk(0.25), AQ), AQPair(topk(0.25), {**AQ, "batch_dim": 1})
    for _ in range(3):
        x = torch.zeros(4, 4, 6)
        x[:, :, 2] = torch.randn(4, 4)
        same = pair(x, sample_ids=ids(1, 2, 3, 4))
        assert torch.equal(turned(x.transpose(0, 1), sample_ids=ids(1, 2, 3, 4)), same.transpose(0, 1))
    assert turned.in_step() and torch.equal(turned.state_of(2), pair.state_of(2))


def test_aqsgd_forgets_what_is_not_finite():
    x = torch.randn(2, 8)
    broken = x.clone()
    broken[0, 3] = torch.nan
    pair = AQPair(topk(0.25, "sample"), AQ)
    assert not pair(broken, sample_ids=ids(1, 2)).isfinite().all() and not pair.sender
    pair(x, sample_ids=ids(1, 2))
    before = dict(pair.sender)
    assert not pair(broken, sample_ids=ids(1, 2)).isfinite().all()
    assert all(torch.equal(pair.sender[key], before[key]) for key in before) and pair.in_step()


def test_aqsgd_warm_up_evaluation_and_shapes(caplog):
    x = torch.randn(2, 8)
    pair = AQPair(topk(0.25), AQ)
    pair.observe(x, sample_ids=ids(1, 2))
    assert torch.equal(pair(x, sample_ids=ids(1, 2)), x) and pair.dense == 0
    before = dict(pair.sender)
    plain = build(topk(0.25))
    expected = plain.decode(plain.encode(x, Context()), TensorSpec.of(x), Context())
    assert torch.equal(pair(x, training=False), expected) and pair.sender == before
    longer = torch.randn(2, 9)
    assert (
        torch.equal(pair(longer, sample_ids=ids(1, 2)), longer) and pair.dense == 2 and len(pair.sender) == 2
    )
    assert "samples come in another shape, now [9]" in caplog.text
    kept = AQPair(topk(0.25), {**AQ, "on_new_shape": "keep"})
    for message in (x, longer, x, longer):
        kept(message, sample_ids=ids(1, 2))
    assert kept.dense == 4 and len(kept.sender) == 4 and kept.in_step()


def test_aqsgd_refusals():
    with pytest.raises(CompressionError, match="backward.feedback: 'aqsgd' is not for this direction"):
        Config({"backward": {"feedback": "aqsgd"}})
    with pytest.raises(CompressionError, match="want different sample ids"):
        other = {"forward": {"feedback": {"name": "aqsgd", "scope": "micro_batch"}}}
        Config({"forward": {"feedback": "aqsgd"}, "boundaries": {"1": other}})
    pair = AQPair("bf16", AQ)
    with pytest.raises(
        CompressionError, match="3 sample ids came with a message of shape .2, 8., expected 2"
    ):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2, 3))
    pair(torch.randn(2, 8), sample_ids=ids(1, 2))
    pair.receiver.clear()
    with pytest.raises(CompressionError, match="this side has none"):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (2, 1), (3, 7, 5)], ids=str)
@pytest.mark.parametrize(
    "codec", [topk(0.3), {"name": "quantize", "group_size": 8}, "none"], ids=lambda c: str(c)[:9]
)
@pytest.mark.parametrize("feedback", FEEDBACKS.names())
def test_any_shape_and_dtype(feedback, codec, shape, dtype):
    torch.manual_seed(0)
    pair = AQPair(codec, feedback)
    for step in range(1, 4):
        x = torch.randn(*shape[::-1]).permute(*reversed(range(len(shape)))).to(dtype)  # not contiguous
        arrived = pair(x, step=step, sample_ids=torch.arange(shape[0]))
        assert arrived.isfinite().all()
        if codec == "none":
            torch.testing.assert_close(
                arrived, x, atol=2e-2, rtol=0
            )  # a bf16 difference of two values around 3


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef_mixed", "loco", "aqsgd"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scale(feedback, size):
    """Messages times a number give messages times that number, up to rounding, wherever fp32 reaches."""
    torch.manual_seed(0)
    scaled, plain = AQPair(topk(0.3), feedback), AQPair(topk(0.3), feedback)
    for step in range(1, 6):
        x = torch.randn(3, 20)
        place = {"step": step, "sample_ids": ids(1, 2, 3)}
        torch.testing.assert_close(scaled(x * size, **place) / size, plain(x, **place), atol=2e-2, rtol=1e-2)
