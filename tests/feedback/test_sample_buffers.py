"""AQ-SGD between two ends: a buffer for each sample, equal on both."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.config import Config
from ds_compress.errors import CompressionError
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
    with pytest.raises(CompressionError, match="forward.feedback.store: unknown key.*; allowed: .*offload"):
        Config({"forward": {"feedback": {**AQ, "store": "host"}}})
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
    with pytest.raises(CompressionError, match="the receiver does not"):
        pair(torch.randn(2, 8), sample_ids=ids(1, 2))
