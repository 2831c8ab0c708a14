"""DeepSpeed's universal checkpoints: what four stages have saved, two stages load and go on with."""

import shutil
import sys

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from tests.support.pipeline import batches, build, channel_state, ds_config, log_lines, skip_steps
from tests.support.ranks import run_ranks

SAVED, END = 3, 6
EF21 = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef21"}
LOSSY = {"forward": EF21, "backward": EF21, "min_numel": 0}
# the conversion takes the moments of Adam
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def run(stages, block, folder, universal=False):
    """Train; four stages save after `SAVED` steps, two load what they have saved, converted."""
    changes = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = build(stages, ds_config(block, optimizer=ADAM, zero_optimization={"stage": 1}, **changes))
    warnings, data, losses = log_lines(), batches(), []
    if universal:
        engine.load_checkpoint(str(folder), tag="universal")
        skip_steps(engine, data, SAVED)
    state = channel_state(engine)
    for step in range(engine.global_steps, END):
        losses.append(engine.train_batch(data).item())
        if step + 1 == SAVED:
            state = channel_state(engine)
            engine.save_checkpoint(str(folder), tag="saved")
    return {"losses": losses[-(END - SAVED) :], "state": state, "warnings": warnings}


def convert(folder, monkeypatch):
    paths = ["--input_folder", str(folder / "saved"), "--output_folder", str(folder / "universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    monkeypatch.setattr(sys, "argv", ["ds_to_universal", "--inject_missing_state", *paths, *workers])
    ds_to_universal.main(ds_to_universal.parse_arguments())


def of_layer_4(state, number):
    return {key.split("/", 1)[1]: value for key, value in state.items() if key.startswith(f"{number}/")}


@pytest.mark.parametrize("block", [LOSSY, {}], ids=["ef21", "none"])
@pytest.mark.extended(keep=1)
def test_two_stages_go_on_where_four_have_stopped(block, tmp_path, monkeypatch):
    """Layer 4 begins a stage in both runs: its boundary, 1 of 3 and then the only one, keeps its state."""
    four = run_ranks(4, run, 4, block, tmp_path)
    convert(tmp_path, monkeypatch)
    fresh = run_ranks(2, run, 2, block, tmp_path, True) if block else []
    for file in (tmp_path / "saved").glob("ds_compress_*"):
        shutil.copy(file, tmp_path / "universal")
    two = run_ranks(2, run, 2, block, tmp_path, True)
    if not block:
        assert two[0]["losses"] == four[0]["losses"]
    assert two[0]["losses"] == pytest.approx(four[0]["losses"], rel=0.05)
    for before, after in zip(four[1:3], two):
        saved, loaded = of_layer_4(before["state"], 1), of_layer_4(after["state"], 0)
        assert saved.keys() == loaded.keys() and all(torch.equal(saved[key], loaded[key]) for key in saved)
        assert bool(saved) == bool(block) and not after["warnings"]
    for rank in fresh[:1]:
        assert not rank["state"] and "state of channels starts from zero" in rank["warnings"][0]
