"""`max_gb`: buffers stay within it, and both sides keep the same samples, also after a resume."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd import sample_codec
from ds_compress.feedback.aqsgd.sample_buffers import BufferBudget
from ds_compress.message.channel import Boundary
from tests.support.codecs import AQPair, ids, topk

WIDTH = 16
ROW = 2 * WIDTH  # bytes


def budget(rows, **options):
    """Room for so many rows, and a bit."""
    return {"name": "aqsgd", "max_gb": (rows + 0.5) * ROW / 1e9, **options}


def kept(memory):
    """Numbers of the samples, the one visited longest ago first."""
    return [int(key[-16:], 16) for key in memory if "/aqsgd/" in key]


@settings(deadline=None, max_examples=40)
@given(
    visits=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=12),
    rows=st.integers(0, 8),
    device=st.sampled_from(["none", "cpu"]),
)
def test_samples_that_are_there_stay(visits, rows, device):
    """Against a list of all visits; a sample may be twice in a message."""
    torch.manual_seed(0)
    pair = AQPair(topk(0.25), budget(rows, offload={"device": device}))
    last, count, longest = {}, 0, 0  # the number of a sample's last visit, those that stay
    for numbers in visits:
        pair(torch.randn(len(numbers), WIDTH), sample_ids=ids(*numbers))
        for number in sorted(dict.fromkeys(numbers), key=lambda number: number not in last):
            count += 1
            longest = max(longest, count - last.pop(number, count))
            patience = 2 * max(longest, rows) if 4 * longest >= rows else 32 * rows
            oldest = min(last, key=last.get, default=None)
            if len(last) == rows and oldest is not None and count - last[oldest] > patience:
                del last[oldest]
            if len(last) < rows:
                last[number] = count
        assert kept(pair.sender) == kept(pair.receiver) == sorted(last, key=last.get)
        assert pair.in_step() and pair.sender[BufferBudget.BYTES].tolist() == [ROW * len(last)]


def found_again(share, order, epochs=5, samples=64):
    """Of all samples those that had a buffer, by epoch; `order`: of an epoch."""
    pair, found = AQPair(topk(0.25), budget(int(share * samples), first_visit="none")), []
    for epoch in range(epochs):
        before = pair.dense
        for numbers in order(epoch, samples).view(-1, 4):
            pair(torch.randn(4, WIDTH), sample_ids=numbers)
        found.append(1 - (pair.dense - before) / samples)
    assert pair.in_step()
    return found


def in_order(epoch, samples):
    return torch.arange(samples)


def shuffled(epoch, samples):
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))


@pytest.mark.parametrize("order", [in_order, shuffled])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_of_an_epoch_that_is_too_large_what_fits_is_found_again(share, order):
    """Eviction of the least recent sample gave 0 % hits with buffers for half an epoch."""
    assert found_again(share, order) == [0.0, *[share] * 4]


def test_samples_that_have_gone_out_of_use_make_room():
    def changed(epoch, samples):
        return shuffled(epoch, samples) + samples * (epoch >= 3)

    first, *found = found_again(0.5, changed, epochs=10)
    assert first == 0 and found[:2] == [0.5] * 2 and found[2] == 0 and found[-2:] == [0.5] * 2


def test_what_comes_without_a_buffer_is_a_first_visit_again():
    pair = AQPair(topk(0.25), budget(2, first_visit="none"))
    for numbers in ((1, 2), (1, 2), (3, 1), (2, 3)):
        pair(torch.randn(2, WIDTH), sample_ids=ids(*numbers))
    assert pair.dense == 2 + 0 + 1 + 1 and kept(pair.sender) == [1, 2]


def test_rows_of_another_shape_count_by_their_bytes():
    pair = AQPair(topk(0.25), budget(3))
    pair(torch.randn(2, WIDTH), sample_ids=ids(1, 2))
    pair(torch.randn(1, 2 * WIDTH), sample_ids=ids(2))
    assert kept(pair.sender) == [1, 2] and pair.sender[BufferBudget.BYTES].tolist() == [3 * ROW]
    pair(torch.randn(1, 4 * WIDTH), sample_ids=ids(2))  # more than all the room
    assert kept(pair.sender) == [1] and pair.sender[BufferBudget.BYTES].tolist() == [ROW]


def boundary(rows):
    return Boundary(0, Config({"forward": {"codec": topk(0.25), "feedback": budget(rows)}, "min_numel": 0}))


def visit(side, number, step):
    side.sample_ids[0] = ids(number)
    torch.manual_seed(step)
    side.forward.encode((torch.randn(1, WIDTH),), side.forward.message_id(step, 0))


@pytest.mark.parametrize("older", [False, True])
def test_a_checkpoint_keeps_the_order_of_the_visits(older):
    """A file has its entries in the order of their names: sample 1 would have been forgotten, not 9."""
    side = boundary(3)
    for step, number in enumerate((9, 5, 1)):
        visit(side, number, step)
    saved = {
        position: dict(sorted((key, value.clone()) for key, value in memory.items()))
        for position, memory in side.saved().items()
    }
    if older:
        del saved[0][BufferBudget.VISITS], saved[0][BufferBudget.VISITED]
    resumed = boundary(3)
    resumed.check(saved)
    resumed.restore(saved, torch.device("cpu"))
    assert resumed.memory[0].keys() == side.memory[0].keys()
    for step, number in enumerate((5, 1, 5, 1, 5, 1, 7), 3):
        for each in (side, resumed):
            visit(each, number, step)
        assert kept(side.memory[0]) == kept(resumed.memory[0])
        ours, theirs = (each.memory[0][BufferBudget.VISITS] for each in (resumed, side))
        assert torch.equal(ours, theirs) or older
    assert kept(side.memory[0]) == [5, 1, 7]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_an_order_that_is_none_is_refused(order):
    side = boundary(3)
    for step, number in enumerate((9, 5, 1)):
        visit(side, number, step)
    saved = side.saved()
    saved[0][BufferBudget.ORDER] = torch.tensor(order)
    with pytest.raises(CompressionError, match=r"entry 'forward/mirror/host/aqsgd.order' is"):
        side.check(saved)


@pytest.mark.parametrize(
    "options, advice",
    [
        ({}, 'inputs are augmented, and "ids": {"column": 2} finds them again'),
        ({"ids": {"column": 1}}, "look at `ids`"),
        ({"max_gb": 1.5}, "or raise max_gb, which is 1.5"),
    ],
)
def test_samples_that_never_return_are_said_once(options, advice, monkeypatch, caplog):
    monkeypatch.setattr(sample_codec, "NO_HITS", 3)
    caplog.set_level(logging.WARNING, "ds_compress")
    strange, calm = (AQPair(topk(0.25), {"name": "aqsgd", **options}) for _ in range(2))
    for number in range(9):
        calm(torch.randn(2, WIDTH), sample_ids=ids(number, number // 2 - 1))
    assert not caplog.records, "one of all samples came back"
    for number in range(9):
        strange(torch.randn(2, WIDTH), sample_ids=ids(number, 100 + number))
    assert len(caplog.records) == 1
    assert "in 3 messages no sample came a second time" in caplog.text and advice in caplog.text
