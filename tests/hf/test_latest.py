"""`latest` names a checkpoint only after every rank has written its part: a kill in between lost the run."""

import time

import pytest
from torch import distributed

from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support.finetuning import BLOCK, prepare
from tests.support.ranks import run_ranks


def saved(path):
    """Whether any file of this rank was still to be written when `latest` was there; rank 1 is slow."""
    run = FinetuneRun(read_settings(path))
    engine, early = run.engine.checkpoint_engine, []
    write = engine.save

    def slow(*args, **kwargs):
        time.sleep(0.3 * distributed.get_rank())
        early.append((run.folder.path / "latest").exists())
        return write(*args, **kwargs)

    engine.save = slow
    run.resume()
    run.train()
    return early


@pytest.mark.parametrize(("block", "zero"), [(None, 0), (BLOCK, 1)], ids=["uncompressed", "zero-1"])
def test_the_last_file_of_the_slowest_rank_is_written_before_it(tmp_path, block, zero):
    config = read_settings(prepare(tmp_path)).ds_config
    del config["ds_compress"]
    config |= {"zero_optimization": {"stage": zero}} | ({"ds_compress": block} if block else {})
    path = prepare(tmp_path, steps=1, ds_config=config)
    (tmp_path / "out").mkdir()
    for early in run_ranks(2, saved, path):
        assert early
        assert not any(early)
    assert (tmp_path / "out" / "latest").read_text() == "step1"
