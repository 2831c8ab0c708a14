"""What all feedbacks promise: silence in evaluation, overflow forgotten, any shape, dtype and scale."""

import pytest
import torch

from ds_compress.config import Config
from ds_compress.feedback import FEEDBACKS
from ds_compress.message.channel import Boundary
from tests.support.codecs import DTYPES, SETTINGS, FourBits, Pair, error_of, goes_with, ids, roundtrip, topk

STATES = ("ef", "ef21", "ef_mixed", "loco")
EACH_STATE = pytest.mark.parametrize("feedback", STATES)


@EACH_STATE
def test_the_mean_of_the_messages_approaches_a_repeated_input(feedback):
    """Plain top-k never sends small entries; with feedback the mean of messages approaches the input."""
    x = torch.arange(1.0, 11)
    pair = Pair(topk(0.3), feedback)
    mean = sum(pair(x) for _ in range(300)) / 300
    assert (mean - x).norm() / x.norm() < 0.05
    assert error_of(topk(0.3), x) > 0.5


@EACH_STATE
def test_evaluation_is_the_plain_codec_and_leaves_no_trace(feedback):
    pair = Pair(topk(0.4), feedback)
    pair(torch.randn(10))
    before = [{key: value.clone() for key, value in side.items()} for side in (pair.sender, pair.receiver)]
    x = torch.randn(10)
    assert torch.equal(pair(x, training=False), roundtrip(topk(0.4), x))
    for side, old in zip((pair.sender, pair.receiver), before):
        assert side.keys() == old.keys() and all(torch.equal(side[key], old[key]) for key in old)


@EACH_STATE
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("codec", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [20, 24])  # of whole groups, or not
def test_what_is_not_finite_is_seen_and_forgotten(width, codec, feedback, bad):
    """With a codec that has one pass for a message and its state: the group; with others, the message."""
    torch.manual_seed(0)
    disturbed, calm, mended = (Pair(codec, feedback) for _ in range(3))
    first, second, broken = torch.randn(3, 3, width)
    for pair in (disturbed, calm, mended):
        pair(first, step=1)
    assert mended(broken, step=2).isfinite().all()
    broken[1, 7] = bad
    arrived = disturbed(broken, step=2)
    in_groups = "group_size" in codec and feedback in ("ef", "ef21")  # all values share a scale of loco's
    forgotten = torch.full(broken.shape, not in_groups)
    forgotten.view(-1)[24:32] = True  # where row 1 has its value 7
    assert not arrived.isfinite().all() and forgotten[~arrived.isfinite()].all()
    expected = torch.where(forgotten, calm(second, step=3), mended(second, step=3))
    assert torch.equal(disturbed(second, step=3), expected)
    for side in ("sender", "receiver"):
        for key, kept in getattr(disturbed, side).items():
            as_before, as_after = (getattr(pair, side)[key] for pair in (calm, mended))
            own = forgotten if kept.shape == forgotten.shape else torch.ones((), dtype=torch.bool)
            assert torch.equal(kept, torch.where(own, as_before, as_after))


@EACH_STATE
def test_the_loss_scale_does_not_matter(feedback):
    """Gradients times a power of two give messages times that power, also when it changes between them."""
    torch.manual_seed(0)
    scaled, plain = Pair(topk(0.3), feedback, "backward"), Pair(topk(0.3), feedback, "backward")
    for step, scale in enumerate([1024.0, 1024.0, 512.0, 64.0, 65536.0]):
        x = torch.randn(3, 20)
        assert torch.equal(scaled(x * scale, loss_scale=scale, step=step), plain(x, step=step) * scale)


@EACH_STATE
def test_sums_beyond_fp16_saturate(feedback):
    """Two finite messages whose sum or difference fp16 cannot hold must not look like an overflow."""
    x, pair = torch.full((4,), 60000.0, dtype=torch.float16), Pair(topk(0.25), feedback)
    for sign in (1, 1, -1, 1, -1, -1, 1):
        assert pair(sign * x).isfinite().all()


@EACH_STATE
def test_messages_of_another_shape(feedback, caplog):
    """Alternating shapes have a state each, as if each had a channel, or start anew with a warning."""
    shapes = [(4, 6), (2, 6), (4, 6), (2, 6), (6, 2)]
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
    pair.codec = FEEDBACKS.build(feedback, "feedback").wrap(Turns())
    for x in torch.randn(5, 20):
        assert torch.allclose(pair(x), x)
    assert pair.sender["turns"] == pair.receiver["turns"] == 5


def test_settings_and_name_show_the_feedback():
    config = Config({"forward": {"codec": "bf16", "feedback": {"name": "ef", "scope": "micro_batch"}}})
    codecs = config.in_force.codecs(None)
    assert codecs.settings["forward"]["feedback"]["scope"] == "micro_batch"
    assert codecs.settings["forward"]["name"] == "bf16"
    assert str(codecs.forward) == "bf16 + ef(scope=micro_batch)"
    assert "feedback" not in codecs.settings["backward"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (2, 1), (3, 7, 5)], ids=str)
@pytest.mark.parametrize("codec", [topk(0.3), {"name": "quantize", "group_size": 8}, "none"], ids=str)
@pytest.mark.parametrize("feedback", FEEDBACKS.names())
def test_any_shape_and_dtype(feedback, codec, shape, dtype):
    torch.manual_seed(0)
    pair = Pair(codec, feedback)
    for step in range(1, 4):
        x = torch.randn(*shape[::-1]).permute(*reversed(range(len(shape)))).to(dtype)  # not contiguous
        arrived = pair(x, step=step, sample_ids=torch.arange(shape[0]))
        assert arrived.isfinite().all()
        if codec == "none":  # a bf16 difference of two values around 3
            torch.testing.assert_close(arrived, x, atol=2e-2, rtol=0)


@EACH_STATE
@pytest.mark.parametrize("codec", ["minmax", {"name": "lowrank", "rank": 3, "dtype": "fp32"}], ids=str)
def test_messages_that_are_not_contiguous_go_on_from_a_checkpoint(codec, feedback):
    """A checkpoint restores states contiguous: they were kept as the message lay in memory, and products with
    that residual had other last bits after a resume."""
    if not goes_with(feedback, codec):
        return
    torch.manual_seed(0)
    whole, resumed = Pair(codec, feedback), Pair(codec, feedback)
    for step in range(1, 4):
        x = torch.randn(13, 128).T
        assert torch.equal(whole(x, step=step), resumed(x, step=step))
        for side in (resumed.sender, resumed.receiver):
            side.update({key: value.contiguous().clone() for key, value in side.items()})


@pytest.mark.parametrize("feedback", [*STATES, {"name": "aqsgd", "first_visit": "bf16"}], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scale(feedback, size):
    """Messages times a number give messages times that number, up to rounding, wherever fp32 reaches."""
    torch.manual_seed(0)
    scaled, plain = Pair(topk(0.3), feedback), Pair(topk(0.3), feedback)
    for step in range(1, 6):
        x = torch.randn(3, 20)
        place = {"step": step, "sample_ids": ids(1, 2, 3)}
        torch.testing.assert_close(scaled(x * size, **place) / size, plain(x, **place), atol=2e-2, rtol=1e-2)


class Unread(dict):
    """The memory of a boundary; only what a message looks up is read."""

    def __iter__(self):
        raise AssertionError("a message read the whole memory, which may hold buffers of a whole data set")

    keys = values = items = __iter__


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("feedback", [*STATES, "aqsgd"])
@pytest.mark.parametrize("codec", [topk(0.4), {"name": "quantize", "bits": 4}], ids=str)
def test_a_message_takes_as_long_whatever_is_remembered(codec, feedback, training):
    """With `aqsgd` each message copied the memory: with buffers of 300,000 samples, 16 ms each."""
    if not goes_with(feedback, codec):
        pytest.skip("this feedback cannot follow this codec")
    block = {"forward": {"codec": codec, "feedback": feedback}, "min_numel": 0}
    both = [Boundary(0, Config(block)) for _ in range(2)]
    for boundary in both:
        boundary.memory[0] = Unread()
    sender, receiver = (boundary.forward for boundary in both)
    for step in range(3):
        number = sender.message_id(step, 0, training)
        both[0].sample_ids[0] = ids(1, 2)
        encoded = sender.encode((torch.randn(2, 32),), number)
        message = receiver.layout_of((torch.randn(2, 32),), number)
        receiver.decode(encoded.packet, message, number, lambda _: encoded.extra)
