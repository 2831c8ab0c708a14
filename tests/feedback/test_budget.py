"""Buffers that no memory is left for, or that are of no use, are said."""

import logging

import pytest
import torch

from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd import sample_codec
from tests.support.codecs import Pair, ids, topk

WIDTH = 16


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_more_samples_than_the_memory_has_room_for_end_the_run(device):
    """Samples beyond it got no buffer, and were sent as first visits for ever, without a word."""
    options = {"name": "aqsgd", "max_gb": 3.5 * 2 * WIDTH / 1e9, "offload": {"device": device}}
    pair = Pair(topk(0.25), options)
    for numbers in ((1, 2), (2, 3), (3, 1)):
        pair(torch.randn(2, WIDTH), sample_ids=ids(*numbers))
    line = "aqsgd.max_gb: 1.12e-07 GB are not enough for the buffers of 4 samples of 32 bytes; give more, or"
    with pytest.raises(CompressionError, match=line):
        pair(torch.randn(2, WIDTH), sample_ids=ids(1, 4))
    assert pair.in_step()


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
