"""State that a codec encodes in checkpoints: smaller files; a resumed run goes on from what it kept."""

import pytest
import torch
from safetensors.torch import save_file

from ds_compress.checkpoint.file import DamagedFile, StateFile, write
from ds_compress.config import Config
from tests.checkpoint.damaged_files import opened
from tests.checkpoint.test_checkpointer import END, SAVED, config, ranks
from tests.support.pipeline import same_weights
from tests.support.refusals import refusal

CODES = {"name": "quantize", "bits": 8}
RECORD = {"version": "0.4", "step": 7, "settings": {}}


def saved(path, codec, tensors):
    write(path, tensors, Config({"checkpoint": {"codec": codec}}).checkpoint_codec, **RECORD)
    return StateFile(path)


def state():
    return {
        "4/upstream/0/forward/sender/ef": torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)),
        "4/upstream/0/backward/sender/ef": torch.full((96, 11), 0.5, dtype=torch.bfloat16),
        "4/upstream/0/codes": torch.arange(1000, dtype=torch.int64),
        "4/upstream/1/forward/sender/ef": torch.rand(3),
        "4/upstream/0/forward/sender/loco.scales": torch.rand(1000),
        "4/upstream/0/forward/sender/mine": torch.rand(1000, dtype=torch.float64),
        "4/upstream/0/mine#0": torch.rand(1000),
        "replicas/gradients/65536/values": torch.rand(1000),
    }


@pytest.mark.parametrize("codec, ratio", [("none", 1.0), (CODES, 2.9), ("lossless", 1.1), ("fp16", 1.75)])
def test_a_file_is_smaller_and_has_what_the_codec_kept(codec, ratio, tmp_path):
    tensors = state()
    file = saved(tmp_path / "state.safetensors", codec, tensors)
    assert file.keys == tensors.keys()
    (large, *others), error = tensors, 0.01 if codec == CODES else 0.0005
    assert (file.read(large) - tensors[large]).norm() < error * tensors[large].norm()
    for key in others:
        found = file.read(key)
        assert found.dtype == tensors[key].dtype and torch.equal(found, tensors[key])
    if codec in ("none", "lossless"):
        assert torch.equal(file.read(large), tensors[large])
    sizes = [path.stat().st_size for path in (file.path, saved(tmp_path / "exact", "none", tensors).path)]
    assert ratio * sizes[0] <= sizes[1] or codec == "none"


def test_who_may_read_other_new_files_may_read_the_state(tmp_path):
    """safetensors 0.8 writes files that their owner alone may read; those of DeepSpeed beside them have the
    mode of the umask, so another user of a shared folder could not resume."""
    other = tmp_path / "other"
    other.touch()
    assert saved(tmp_path / "state", "none", state()).path.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("change", ["missing", "other", "resized"])
def test_a_part_that_is_damaged_is_not_decoded(change, tmp_path):
    file = saved(tmp_path / "state.safetensors", CODES, state())
    key = "4/upstream/0/forward/sender/ef"
    entries, metadata = opened(file.path)
    if change == "missing":
        del entries[f"{key}#1"]
    else:
        entries[f"{key}#1"] = entries[f"{key}#1"][:-1] if change == "resized" else entries[f"{key}#1"] + 1
    save_file(entries, file.path, metadata)
    with pytest.raises(DamagedFile):
        StateFile(file.path).read(key)


@pytest.mark.parametrize("codec", ["lowrank", "topk", "randomk", {"name": "entropy", "bits": 4, "rank": 8}])
def test_a_codec_that_is_not_for_state_is_refused(codec):
    message = refusal(Config, {"checkpoint": {"codec": codec}})
    assert message.startswith("ds_compress.checkpoint.codec: ") and "'quantize', 'lossless'" in message


@pytest.mark.parametrize("name", ["ef", "ef21"])
@pytest.mark.extended(keep=1)
def test_a_run_resumes_from_what_was_kept(name, tmp_path):
    """Both sides of ef21 find the same, and go on."""
    changed = config(name, checkpoint={"codec": CODES})
    exact = ranks(2, 2, changed, tmp_path, end=SAVED)
    coarse = ranks(2, 2, changed, tmp_path, start=SAVED)
    for rank in coarse:
        assert rank["warnings"] == []
    (first, second) = (rank["losses"] for rank in coarse)
    assert first == second and len(first) == END - SAVED
    for before, after in zip(exact, coarse):
        assert before["saved"] and before["saved"].keys() == after["loaded"].keys()
        for key, value in before["saved"].items():
            found = after["loaded"][key]
            assert (found - value).norm() <= 0.02 * value.norm()
            assert value.numel() < 256 or not torch.equal(found, value)
    again = ranks(2, 2, changed, tmp_path, start=SAVED)
    for one, other in zip(coarse, again):
        assert same_weights(one["end"], other["end"])
