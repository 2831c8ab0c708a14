"""`max_gb`: buffers stay within it, and both sides forget the same samples, also after a resume."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import sample_codec
from ds_compress.feedback.sample_store import Rows
from ds_compress.message.channel import Boundary
from tests.support.feedback import AQPair, ids, topk

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
def test_the_samples_visited_longest_ago_are_forgotten(visits, rows, device):
    """Against a list of all visits; a sample may be twice in a message."""
    torch.manual_seed(0)
    pair = AQPair(topk(0.25), budget(rows, offload={"device": device}))
    order = []
    for numbers in visits:
        pair(torch.randn(len(numbers), WIDTH), sample_ids=ids(*numbers))
        for number in dict.fromkeys(numbers):
            order = [other for other in order if other != number] + [number]
        order = order[max(0, len(order) - rows) :]
        assert kept(pair.sender) == kept(pair.receiver) == order
        assert pair.in_step() and pair.sender[Rows.BYTES].tolist() == [ROW * len(order)]


def test_forgotten_samples_come_as_first_visits_again():
    pair = AQPair(topk(0.25), budget(2, first="none"))
    for numbers in ((1, 2), (1, 2), (3, 1), (2, 1)):
        pair(torch.randn(2, WIDTH), sample_ids=ids(*numbers))
    assert pair.dense == 2 + 0 + 1 + 1


def test_rows_of_another_shape_count_by_their_bytes():
    pair = AQPair(topk(0.25), budget(3))
    pair(torch.randn(3, WIDTH), sample_ids=ids(1, 2, 3))
    pair(torch.randn(1, 2 * WIDTH), sample_ids=ids(2))
    assert kept(pair.sender) == [3, 2] and pair.sender[Rows.BYTES].tolist() == [3 * ROW]


def boundary(rows):
    return Boundary(0, Config({"forward": {"codec": topk(0.25), "feedback": budget(rows)}, "min_numel": 0}))


def visit(side, number, step):
    side.sample_ids[0] = ids(number)
    torch.manual_seed(step)
    side.forward.encode((torch.randn(1, WIDTH),), side.forward.message_id(step, 0))


def test_a_checkpoint_keeps_the_order_of_the_visits():
    """A file has its entries in the order of their names: sample 1 would have been forgotten, not 9."""
    side = boundary(3)
    for step, number in enumerate((9, 5, 1)):
        visit(side, number, step)
    saved = {
        position: dict(sorted((key, value.clone()) for key, value in memory.items()))
        for position, memory in side.saved().items()
    }
    resumed = boundary(3)
    resumed.check(saved)
    resumed.restore(saved, torch.device("cpu"))
    assert resumed.memory[0].keys() == side.memory[0].keys()
    for step, number in enumerate((7, 5, 8), 3):
        for each in (side, resumed):
            visit(each, number, step)
        assert kept(side.memory[0]) == kept(resumed.memory[0])
    assert kept(side.memory[0]) == [7, 5, 8]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_an_order_that_is_none_is_refused(order):
    side = boundary(3)
    for step, number in enumerate((9, 5, 1)):
        visit(side, number, step)
    saved = side.saved()
    saved[0][Rows.ORDER] = torch.tensor(order)
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
    monkeypatch.setattr(sample_codec, "STRANGE", 3)
    caplog.set_level(logging.WARNING, "ds_compress")
    strange, calm = (AQPair(topk(0.25), {"name": "aqsgd", **options}) for _ in range(2))
    for number in range(9):
        calm(torch.randn(2, WIDTH), sample_ids=ids(number, number // 2 - 1))
    assert not caplog.records, "one of all samples came back"
    for number in range(9):
        strange(torch.randn(2, WIDTH), sample_ids=ids(number, 100 + number))
    assert len(caplog.records) == 1
    assert "in 3 messages no sample came a second time" in caplog.text and advice in caplog.text
