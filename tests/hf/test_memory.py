"""No rank holds the whole model: what it takes is its share and a constant."""

import pytest

from tests.support.hf_memory import MB, measured, save
from tests.support.ranks import run_ranks

CONSTANT = 400 * MB
"""Imports, activations of four micro-batches, packets; measured: up to 290 MB."""


@pytest.mark.slow
def test_a_rank_takes_its_share_and_a_constant(tmp_path):
    run_ranks(1, save, tmp_path)
    for stages in (1, 2, 4):
        for found in run_ranks(stages, measured, tmp_path, stages):
            assert found["parameters"] < 1.15 * 255 * MB / stages
            assert found["loading"] < found["parameters"] + 100 * MB
            assert found["training"] < found["parameters"] + CONSTANT
