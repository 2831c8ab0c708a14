"""AQ-SGD: a buffer for each sample, found by its id, equal on both ends; first visits; room for buffers."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.cli.check import message_sizes
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.config import Config
from ds_compress.feedback.aqsgd import sample_codec
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.message.channel import Boundary
from tests.support.codecs import INPUTS, Pair, ids, roundtrip, topk
from tests.support.pipeline import alike, batches, ds_config, layers, simulated, train_step
from tests.support.refusals import refusal

AQ = {"name": "aqsgd", "dtype": "fp32", "first_visit": "none"}


def test_aqsgd_golden():
    pair = Pair(topk(0.25), AQ)
    messages = [pair(x[None], sample_ids=ids(-5))[0].tolist() for x in INPUTS]
    assert messages == [[4, 3, 2, 1], [4, -2, 2, 1], [4, -2, -3, 1]]
    assert pair.state().tolist() == [4, -2, -3, 1] and pair.in_step() and pair.dense == 1


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_aqsgd_stores_are_alike(device, dtype):
    options = {**AQ, "offload": {"device": device}, "dtype": dtype}
    pair, plain = Pair(topk(0.25), options), Pair(topk(0.25), {**AQ, "dtype": dtype})
    torch.manual_seed(0)
    for _ in range(4):
        for first in range(0, 8, 2):
            x, two = torch.randn(2, 3, 5), ids(first, first + 1)
            assert torch.equal(pair(x, sample_ids=two), plain(x, sample_ids=two))
    stored = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert [(row.numel(), row.dtype) for row in pair.sender.values()] == [(15, stored)] * 8
    assert pair.in_step()


def test_aqsgd_duplicates_and_batches():
    torch.manual_seed(0)
    twice = Pair(topk(0.25, "sample"), AQ)
    for _ in range(5):
        twice(torch.randn(3, 8), sample_ids=ids(7, 7, 9))
    assert len(twice.sender) == 2 and twice.in_step()
    batch = Pair(topk(0.25, "sample"), {**AQ, "scope": "micro_batch"})
    for _ in range(3):
        batch(torch.randn(3, 8), sample_ids=ids(1))
    assert batch.state().shape == (3, 8) and batch.in_step() and batch.dense == 1


def test_aqsgd_counts_samples_in_any_dimension():
    torch.manual_seed(0)
    pair, turned = Pair(topk(0.25), AQ), Pair(topk(0.25), {**AQ, "batch_dim": 1})
    for _ in range(3):
        x = torch.zeros(4, 4, 6)
        x[:, :, 2] = torch.randn(4, 4)
        same = pair(x, sample_ids=ids(1, 2, 3, 4))
        assert torch.equal(turned(x.transpose(0, 1), sample_ids=ids(1, 2, 3, 4)), same.transpose(0, 1))
    assert turned.in_step() and torch.equal(turned.state_of(2), pair.state_of(2))


def test_aqsgd_warm_up_evaluation_and_shapes(caplog):
    x = torch.randn(2, 8)
    pair = Pair(topk(0.25), AQ)
    pair.observe(x, sample_ids=ids(1, 2))
    pair.observe(torch.full_like(x, torch.nan), sample_ids=ids(1, 2))  # an overflow
    assert torch.equal(pair(x, sample_ids=ids(1, 2)), x) and pair.dense == 0
    before = dict(pair.sender)
    assert torch.equal(pair(x, training=False), roundtrip(topk(0.25), x)) and pair.sender == before
    longer = torch.randn(2, 9)
    assert torch.equal(pair(longer, sample_ids=ids(1, 2)), longer)
    assert pair.dense == 2 and len(pair.sender) == 2
    assert "samples come in another shape, now [9]" in caplog.text
    kept = Pair(topk(0.25), {**AQ, "on_new_shape": "keep"})
    for message in (x, longer, x, longer):
        kept(message, sample_ids=ids(1, 2))
    assert kept.dense == 4 and len(kept.sender) == 4 and kept.in_step()


def test_aqsgd_refusals():
    pair, x = Pair("bf16", AQ), torch.randn(2, 8)
    line = refusal(pair, x, sample_ids=ids(1, 2, 3))
    assert "3 sample ids came with a message of shape [2, 8], expected 2" in line
    pair(x, sample_ids=ids(1, 2))
    pair.receiver.clear()
    assert "the receiver does not" in refusal(pair, x, sample_ids=ids(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_hashes_follow_the_sample(dtype):
    samples = torch.eye(16).bool() if dtype == torch.bool else torch.arange(64).view(16, 4).to(dtype)
    whole = SampleIds().of((samples, None))
    assert whole.dtype == torch.int64 and len(set(whole.tolist())) == 16
    order = torch.randperm(16)
    assert torch.equal(SampleIds().of((samples[order], None)), whole[order])
    assert torch.equal(torch.cat([SampleIds().of((part, None)) for part in samples.split(5)]), whole)


def test_hashes_see_every_input():
    tokens, positions, shared = torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(1, 4)
    before = SampleIds().of(((tokens, positions, shared), None))
    positions[1, 2] = 1
    after = SampleIds().of(((tokens, positions, shared), None))
    assert (before == after).tolist() == [True, False, True]


def test_hashes_of_a_lone_sample_with_a_column():
    """The column of a one-row matrix is contiguous, but its stride is not 1; torch views no bytes of it."""
    tokens = torch.arange(8).view(2, 4)
    both = SampleIds().of(((tokens, tokens[:, 0]), None))
    assert torch.equal(SampleIds().of(((tokens[:1], tokens[:1, 0]), None)), both[:1])


def test_columns_and_batches():
    batch = (torch.zeros(3, 2), torch.zeros(3), torch.tensor([8, 9, 2], dtype=torch.int32))
    assert SampleIds(column=2).of(batch).tolist() == [8, 9, 2]
    together = SampleIds(column=2, per_batch=True)
    assert together.of(batch).shape == (1,)
    assert together.of(batch) != together.of((*batch[:2], batch[2].flip(0)))
    for bad in (0, 1, 3):
        assert f"aqsgd.ids.column: {bad} of the data" in refusal(SampleIds(column=bad).of, batch)


def test_counts():
    specs = [TensorSpec((7,), torch.int64), TensorSpec((5, 3, 2), torch.float32)]
    assert SampleIds().count(specs) == 5 and SampleIds(dim=1).count(specs) == 3
    assert SampleIds(per_batch=True).count(specs) == 1
    assert "has no dimension 3" in refusal(SampleIds(dim=3).count, specs)


TWO = {"name": "quantize", "bits": 2, "group_size": 128, "hadamard": True}
FOUR = {**TWO, "bits": 4}
DITHER = {"rounding": "dither"}
CODECS = [TWO, topk(0.1), {**TWO, **DITHER}, {"name": "entropy", "bits": 2, **DITHER}]
FIRSTS = ["none", FOUR, {**FOUR, **DITHER}, {"name": "quantize", "bits": 8, "group_size": 32}, "bf16"]


def crossed(codec, x, step):
    """What a codec alone makes of `x` [samples, ...], and the bytes that it takes."""
    plain, ctx = build(codec), Context(step=step)
    parts = plain.encode(x, ctx)
    return plain.decode(parts, TensorSpec.of(x), Context(step=step)), sum(part.nbytes for part in parts)


class ReferenceBuffers:
    """Samples and their buffers as the docstring of `sample_codec` says it, with none of its code."""

    def __init__(self, codec, first):
        self.codec, self.first = codec, first
        self.buffers = {}

    def __call__(self, x, numbers, step):
        """What arrives, and the bytes of the payloads of both packets."""
        unseen = [place for place, number in enumerate(numbers) if number not in self.buffers]
        old = torch.stack([self.buffers.get(number, torch.zeros_like(x[0])) for number in numbers])
        more = 0
        if unseen:
            old[unseen], more = crossed(self.first, x[unseen], step)
        change, taken = crossed(self.codec, x - old, step)
        if self.first == "none":  # exact: what the codec makes of no change may be one
            change[unseen] = 0
        self.buffers.update(zip(numbers, old + change))
        return old + change, taken + more


@settings(deadline=None, max_examples=40)
@given(
    codec=st.sampled_from(CODECS),
    first=st.sampled_from(FIRSTS),
    visits=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=6),
    width=st.sampled_from([1, 7, 128, 200]),
)
def test_messages_are_as_described(codec, first, visits, width):
    """Both sides have the buffers of the reference; no message is larger than all first visits."""
    torch.manual_seed(0)
    pair = Pair(codec, {"name": "aqsgd", "dtype": "fp32", "first_visit": first})
    reference = ReferenceBuffers(codec, first)
    for step, numbers in enumerate(visits):
        x = torch.randn(len(numbers), width)
        expected, taken = reference(x, numbers, step)
        assert torch.equal(pair(x, sample_ids=ids(*numbers), step=step), expected)
        largest = pair.codec.largest_extra_payload(TensorSpec.of(x))
        second = sum(part.nbytes for part in pair.extra)
        assert second + sum(part.nbytes for part in pair.parts[:-1]) == taken  # without the flags
        assert second <= sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in largest)
        assert pair.in_step()
    assert {f"{number:016x}" for number in reference.buffers} == {key[-16:] for key in pair.sender}
    assert all(torch.equal(pair.state_of(number), row) for number, row in reference.buffers.items())


def wire_bytes(block, messages, shape=(8, 64, 128)):
    """Bytes on the wire of forward messages of so many samples, visited as `messages` lists them."""
    upstream, downstream = (Boundary(0, Config({"min_numel": 0, **block})) for _ in range(2))
    sizes = []
    for step, numbers in enumerate(messages):
        message_id = upstream.forward.message_id(step, 0)
        upstream.sample_ids[0] = ids(*numbers)
        x = (torch.randn(shape),)
        before = upstream.forward.sent.wire_bytes
        encoded = upstream.forward.encode(x, message_id)
        expected = downstream.forward.layout_of(x, message_id)
        downstream.forward.decode(encoded.packet, expected, message_id, lambda nbytes: encoded.extra)
        sizes.append(upstream.forward.sent.wire_bytes - before)
        assert sizes[-1] == encoded.nbytes
    return sizes, upstream.forward


def test_first_visits_are_paid_for_once():
    """The declared sizes of the largest message and of the others are exact, headers included."""
    epochs = [range(8), range(8, 16)] * 6
    block = {"forward": {"codec": TWO, "feedback": "aqsgd"}}
    sizes, channel = wire_bytes(block, epochs)
    assert 8 * sum(sizes) / len(sizes) / (8 * 64 * 128) < 2.98  # 2.25 bits, and 4.25 for one of six visits
    assert sizes[0] == sizes[1] == channel.sent.latest.most_bytes(channel.codec)
    assert set(sizes[2:]) == {channel.sent.latest.compressed_bytes(channel.codec)}
    assert (channel.sent.samples, channel.sent.returned) == (96, 80)
    assert channel.sent.latest.describe(channel.codec) == f"at most {sizes[0]:,} bytes"
    dense = {"forward": {"codec": TWO, "feedback": {"name": "aqsgd", "first_visit": "none"}}}
    assert 8 * sum(wire_bytes(dense, epochs)[0]) / len(sizes) / (8 * 64 * 128) > 7


def test_check_tells_the_largest_message_too():
    """It said 2 bits, and 34 crossed."""
    spec = TensorSpec((8, 64, 128), torch.float32)
    for first, bits in (({}, 6.52), ({"first_visit": "none"}, 34.27)):
        forward = {"codec": TWO, "feedback": {"name": "aqsgd", **first}}
        aqsgd, plain = message_sizes(Config({"forward": forward, "backward": {"codec": "bf16"}}), 2, spec)
        assert round(aqsgd["bits_per_value"], 2) == 2.26
        assert round(8 * aqsgd["wire_bytes_at_most"] / spec.numel, 2) == bits
        assert plain["wire_bytes_at_most"] == plain["wire_bytes"]


@pytest.mark.parametrize("codec", ["none", "bf16", FOUR, {**TWO, "bits": 8}, {"name": "entropy", "bits": 6}])
def test_a_codec_that_is_good_enough_sends_first_visits_by_itself(codec):
    """In packets of one size, and nothing else: an 8-bit message would have a 4-bit one beside it."""
    sizes, _ = wire_bytes({"forward": {"codec": codec, "feedback": "aqsgd"}}, [range(8), range(4, 12)] * 2)
    assert len(set(sizes)) == 1
    x = torch.randn(3, 128)
    pair = Pair(codec, {"name": "aqsgd", "dtype": "fp32"})
    assert torch.equal(pair(x, sample_ids=ids(1, 2, 3), step=4), crossed(codec, x, 4)[0])
    assert pair.dense == 0 and pair.in_step()


@pytest.mark.parametrize("first", ["none", FOUR], ids=str)
def test_a_visit_that_is_not_finite_is_seen_and_forgotten(first):
    """By itself, and beside samples that were there before: these keep their buffers."""
    pair = Pair(TWO, {"name": "aqsgd", "first_visit": first})
    x = torch.randn(8, 128)
    broken = x.clone()
    broken[1, 5] = torch.inf
    assert not pair(broken, sample_ids=ids(*range(8))).isfinite().all() and not pair.sender
    pair(x, sample_ids=ids(*range(8)))
    before = dict(pair.sender)
    for numbers in (range(7, -1, -1), [0, 20, 2, 3, 4, 5, 6, 7], range(10, 18)):
        assert not pair(broken, sample_ids=ids(*numbers)).isfinite().all()
        assert pair.sender.keys() == before.keys() and pair.in_step()
        assert all(torch.equal(pair.sender[key], before[key]) for key in before)


def test_a_gradient_can_follow_the_selection_of_a_first_visit():
    """So the codec of the messages is sent with first visits, too."""
    backward = {"codec": {"name": "topk", "indices": "reuse"}}
    config = ds_config(alike(topk(0.1), "aqsgd", backward=backward, min_numel=0))
    model, data = simulated(layers(), config, [4]), batches()
    assert all(train_step(model, data) > 0 for _ in range(2))


WIDTH = 16


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_more_samples_than_the_memory_has_room_for_end_the_run(device):
    """Samples without room for a buffer were first visits each time they came, and nothing said so."""
    options = {"name": "aqsgd", "max_gb": 3.5 * 2 * WIDTH / 1e9, "offload": {"device": device}}
    pair = Pair(topk(0.25), options)
    for numbers in ((1, 2), (2, 3), (3, 1)):
        pair(torch.randn(2, WIDTH), sample_ids=ids(*numbers))
    line = "aqsgd.max_gb: 1.12e-07 GB are not enough for the buffers of 4 samples of 32 bytes; give more, or"
    assert line in refusal(pair, torch.randn(2, WIDTH), sample_ids=ids(1, 4)) and pair.in_step()


@pytest.mark.parametrize(
    "options, advice",
    [
        ({}, 'inputs are augmented, and "ids": {"column": 2} finds them again'),
        ({"ids": {"column": 1}}, "look at `ids`"),
    ],
)
def test_samples_that_never_return_are_said_once(options, advice, monkeypatch, caplog):
    monkeypatch.setattr(sample_codec, "NO_HITS", 3)
    caplog.set_level(logging.WARNING, "ds_compress")
    strange, calm = (Pair(topk(0.25), {"name": "aqsgd", **options}) for _ in range(2))
    for number in range(9):
        calm(torch.randn(2, WIDTH), sample_ids=ids(number, number // 2 - 1))
    assert not caplog.records, "one of all samples came back"
    for number in range(9):
        strange(torch.randn(2, WIDTH), sample_ids=ids(number, 100 + number))
    assert len(caplog.records) == 1
    assert "in 3 messages no sample came a second time" in caplog.text and advice in caplog.text
