"""What error feedback holds back, against the message it belongs to."""

import math

import pytest
import torch

from ds_compress.config import Config
from ds_compress.message.channel import Boundary, Channel
from ds_compress.monitor.metrics import residual_values


def channel(direction, memory, loss_scale=1.0):
    boundary = Boundary(0, Config({}))
    boundary.memory = memory
    boundary.begin_step(loss_scale)
    return Channel(boundary, direction, boundary.config.codecs(0).backward)


def test_residuals_of_two_micro_batches_and_two_tensors():
    """Norms 3 and 4 of one tensor, 12 and 0 of the other: 13 together, 13 / sqrt(2) for a micro-batch."""
    key = "backward/sender/ef/micro_batch"
    memory = {
        0: {f"{key}0": torch.tensor([3.0, 0.0]), f"{key}1": torch.tensor([0.0, 4.0])},
        1: {f"{key}0": torch.tensor([12.0]), f"{key}1": torch.zeros(1)},
    }
    memory[0]["forward/sender/ef/micro_batch0"] = torch.tensor([1e6])  # of the other direction
    memory[0]["backward/mirror/ef21"] = torch.tensor([1e6])  # not held back
    found = residual_values(channel("backward", memory), 2.0)
    assert found["residual_norm"] == 13
    assert found["residual_share"] == pytest.approx(13 / math.sqrt(2) / 2)
    assert found["buffer_bytes"] == 4 * (2 + 2 + 1 + 1 + 1), "what both sides hold is kept too"


def test_a_loss_scale_makes_no_share_smaller():
    """Residuals are in units that it does not change, the message is not."""
    memory = {0: {"backward/sender/ef": torch.tensor([6.0])}}
    assert residual_values(channel("backward", memory, 1024.0), 2 * 1024.0)["residual_share"] == 3


def test_where_there_is_nothing_to_compare():
    assert residual_values(channel("backward", {0: {}}), 1.0) == {
        "residual_norm": 0,
        "residual_share": 0,
        "buffer_bytes": 0,
    }
    memory = {0: {"backward/sender/ef": torch.ones(1)}}
    for norm in (0.0, math.nan):
        assert math.isnan(residual_values(channel("backward", memory), norm)["residual_share"])
