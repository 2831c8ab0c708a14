"""AQ-SGD between two ends: a buffer for each sample, found by its id, equal on both."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from tests.support.codecs import INPUTS, AQPair, ids, topk

AQ = {"name": "aqsgd", "dtype": "fp32", "first_visit": "none"}


def test_aqsgd_golden():
    pair = AQPair(topk(0.25), AQ)
    messages = [pair(x[None], sample_ids=ids(-5))[0].tolist() for x in INPUTS]
    assert messages == [[4, 3, 2, 1], [4, -2, 2, 1], [4, -2, -3, 1]]
    assert pair.state().tolist() == [4, -2, -3, 1] and pair.in_step() and pair.dense == 1


def test_aqsgd_keeps_samples_apart():
    """However samples are mixed into micro-batches, each row is what a channel for that sample would give."""
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


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_aqsgd_stores_are_alike(device, dtype):
    options = {**AQ, "offload": {"device": device}, "dtype": dtype}
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
    assert pair.in_step()


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
    pair = AQPair("bf16", AQ)
    with pytest.raises(
        CompressionError, match="3 sample ids came with a message of shape .2, 8., expected 2"
    ):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2, 3))
    pair(torch.randn(2, 8), sample_ids=ids(1, 2))
    pair.receiver.clear()
    with pytest.raises(CompressionError, match="the receiver does not"):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_hashes_follow_the_sample(dtype):
    samples = (
        torch.arange(64).view(16, 4).to(dtype) if dtype != torch.bool else torch.eye(16, dtype=torch.bool)
    )
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


def test_columns_and_batches():
    batch = (torch.zeros(3, 2), torch.zeros(3), torch.tensor([8, 9, 2], dtype=torch.int32))
    assert SampleIds(column=2).of(batch).tolist() == [8, 9, 2]
    together = SampleIds(column=2, per_batch=True)
    assert together.of(batch).shape == (1,)
    assert together.of(batch) != together.of((*batch[:2], batch[2].flip(0)))
    for bad in (0, 1, 3):
        with pytest.raises(CompressionError, match=f"aqsgd.ids.column: {bad} of the data"):
            SampleIds(column=bad).of(batch)


def test_counts():
    specs = [TensorSpec((7,), torch.int64), TensorSpec((5, 3, 2), torch.float32)]
    assert SampleIds().count(specs) == 5 and SampleIds(dim=1).count(specs) == 3
    assert SampleIds(per_batch=True).count(specs) == 1
    with pytest.raises(CompressionError, match="has no dimension 3"):
        SampleIds(dim=3).count(specs)
