"""What a run keeps does not grow with its steps, nor with the shapes of its messages."""

import gc

import pytest
import torch

from ds_compress.codec import names
from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from tests.engine.test_session import EVERYTHING, reached
from tests.support.pipeline import alike, batches, build, ds_config
from tests.support.ranks import run_ranks

SHAPES = 1024
"""Those that any part of ds_compress remembers, at most."""


def left_after_steps(block, folder):
    """After each 12 steps and an evaluation: how many objects the session leads to, without DeepSpeed's
    engine; how many of ours and of DeepSpeed's pipeline there are while Python does not collect."""
    sink = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    engine, data = build(2, ds_config(block, csv_monitor=sink)), batches()
    counts, stops = [], [engine, engine.module, engine.grid, engine.monitor]
    for _ in range(3):
        for _ in range(12):
            engine.train_batch(data)
        engine.eval_batch(data)
        gc.disable()
        of = (type(each).__module__ for each in gc.get_objects())
        alive = sum(module.startswith(("ds_compress", "deepspeed.runtime.pipe")) for module in of)
        counts.append((len(reached(engine.ds_compress, stops)), alive))
    return counts


BLOCKS = {"everything": EVERYTHING, "quantize": alike("quantize", "ef", monitor={"every": 1})}


@pytest.mark.parametrize("block", BLOCKS)
def test_steps_leave_nothing(block, tmp_path):
    """Each written step once left two numbers for the line at the end. And some programs switch Python's
    garbage collector off for speed. What each schedule was made of, about 60 objects for four micro-batches,
    then stayed: its steps and the plan of its messages held each other."""
    for _, first, second in run_ranks(2, left_after_steps, BLOCKS[block], tmp_path):
        for before, after in zip(first, second):
            assert after - before < 10, (first, second)


@pytest.mark.parametrize("codec", names())
@pytest.mark.extended(keep=1)
def test_shapes_leave_nothing(codec):
    """With `dynamic_shape` both sides remembered each shape that had ever come: 12 kB for each."""
    config = Config(alike(codec, min_numel=0))
    sender, receiver = Boundary(0, config), Boundary(0, config)

    def exchange(lengths):
        for length in lengths:
            x = torch.ones(1, length, 3)
            for here, there in ((sender.forward, receiver.forward), (receiver.backward, sender.backward)):
                number = here.message_id(0, 0)
                encoded = here.encode((x,), number)
                there.decode(encoded.packet, there.layout_of((x,), number), number, lambda _: encoded.extra)
        gc.collect()
        return sum(type(each) is not tuple for each in gc.get_objects())  # of these Python counts some

    before = exchange(range(1, SHAPES + 1))
    more = SHAPES // 4
    assert exchange(range(SHAPES + 1, SHAPES + more + 1)) - before < more
