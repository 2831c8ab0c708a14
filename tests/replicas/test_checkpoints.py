"""Residuals of gradients between replicas in checkpoints: a resumed run equals one that went on."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_universal import ADAM, convert
from tests.support.pipeline import build, ds_config, log_lines
from tests.support.ranks import run_ranks
from tests.support.replicas import KINDS, train_steps, wide_layers

BLOCK = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}}


def train_and_save(folder, stages, config, layers=wide_layers):
    engine = build(stages, config, layers())
    train_steps(engine, 3)
    engine.save_checkpoint(folder)
    return train_steps(engine, 2, skipped=3)


def resume(folder, stages, config, layers=wide_layers):
    lines = log_lines()
    engine = build(stages, config, layers())
    engine.load_checkpoint(folder)
    return train_steps(engine, 2, skipped=3), [line for line in lines if "gradients" in line]


@pytest.mark.parametrize("codec", [{"name": "quantize", "bits": 4}, {"name": "lowrank", "rank": 4}], ids=str)
@pytest.mark.parametrize("feedback", ["ef", "loco"])
@pytest.mark.parametrize("stages", [1, 2])
# DeepSpeed 0.19.8 does not load BF16_Optimizer's own without ZeRO
@pytest.mark.parametrize("kind", ["fp32", "bf16 accumulation", "bf16 zero 1"])
@pytest.mark.extended(keep=1)
def test_a_resumed_run_equals_one_that_went_on(codec, feedback, stages, kind, tmp_path):
    """I5: residuals are in the checkpoint, and what lowrank starts from."""
    if codec["name"] == "lowrank" and kind == "bf16 accumulation":
        pytest.skip("partitions cut matrices")
    parameters = 4 if codec["name"] == "quantize" and kind == "bf16 zero 1" else "none"
    block = {"replicas": {"codec": codec, "parameters": parameters, "feedback": feedback}}
    config = ds_config(block, replicas=2, **KINDS[kind])
    went_on = run_ranks(2 * stages, train_and_save, tmp_path, stages, config)
    resumed = run_ranks(2 * stages, resume, tmp_path, stages, config)
    assert [digests for digests, _ in resumed] == went_on
    assert not any(lines for _, lines in resumed)


def test_another_number_of_replicas_starts_from_zero(tmp_path):
    run_ranks(2, train_and_save, tmp_path, 1, ds_config(BLOCK, replicas=2))
    results = run_ranks(3, resume, tmp_path, 1, ds_config(BLOCK, replicas=3))
    lines = [line for _, own in results for line in own]
    assert len(lines) == 1 and "start from zero: the codec, the number of replicas" in lines[0]
    assert len({tuple(digests) for digests, _ in results}) == 1


def load_into_replicas(folder):
    """All that is logged when a run begins to compress gradients at a checkpoint of one that did not."""
    config = ds_config(replicas=2)
    build(1, config, wide_layers()).save_checkpoint(folder)
    engine, lines = build(1, {**config, "ds_compress": BLOCK}, wide_layers()), log_lines()
    engine.load_checkpoint(folder)
    return lines


def test_a_checkpoint_without_a_file_is_not_called_damaged(tmp_path):
    """Each rank warned that its file cannot be read, and rank 0 that it is damaged or cannot be read."""
    lines = [line for own in run_ranks(2, load_into_replicas, tmp_path) for line in own]
    assert len(lines) == 1 and "start from zero: the checkpoint has none" in lines[0]


def lose_a_file(folder):
    """Whether a rank has residuals before a checkpoint is loaded, and after it was, without rank 1's file."""
    engine = build(1, ds_config(BLOCK, replicas=2), wide_layers())
    train_steps(engine, 1)
    engine.save_checkpoint(folder, tag="saved")
    before = any(engine.ds_compress.gradients.saved().values())
    if torch.distributed.get_rank() == 1:
        (file,) = Path(folder).rglob("ds_compress_pp00_dp01*")
        file.unlink()
    torch.distributed.barrier()
    engine.load_checkpoint(folder, tag="saved")
    return before, any(engine.ds_compress.gradients.saved().values())


def test_residuals_that_one_rank_lacks_start_from_zero_on_all(tmp_path):
    assert run_ranks(2, lose_a_file, tmp_path) == [(True, False)] * 2


def load_universal(folder, config):
    """Whether the bf16 weights are the fp32 ones, rounded; the program begins with weights of its own."""
    engine = build(1, config, wide_layers(), base_seed=5)
    engine.load_checkpoint(folder, tag="universal")
    optimizer, rank = engine.optimizer, engine.grid.get_data_parallel_id()
    pairs = zip(optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition)
    return all(torch.equal(flat.chunk(2)[rank], new.bfloat16()) for flat, new in pairs)


def save(folder, config):
    engine = build(1, config, wide_layers())
    train_steps(engine, 1)
    engine.save_checkpoint(folder, tag="saved")


def test_a_universal_checkpoint_brings_whole_weights(tmp_path, monkeypatch):
    """With "parameters" they came as differences in few bits to those that the program had begun with."""
    block = {"replicas": {**BLOCK["replicas"], "parameters": 4}}
    settings = {**KINDS["bf16 zero 1"], "optimizer": ADAM, "replicas": 2}
    run_ranks(2, save, tmp_path, ds_config(block, **settings))
    convert(tmp_path, monkeypatch)
    config = ds_config(block, checkpoint={"load_universal": True}, **settings)
    assert run_ranks(2, load_universal, tmp_path, config) == [True, True]
