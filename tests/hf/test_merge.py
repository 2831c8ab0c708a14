"""What a pipeline trained is an ordinary checkpoint once it is merged, whatever names are on disk."""

import json

import pytest
import torch
from safetensors import safe_open

from ds_compress.errors import CompressionError
from ds_compress.hf.merge import merge
from tests.hf.test_stages import LORA, MICRO_BATCHES, one_step
from tests.support.finetuning import batch, load_model, run_model, save
from tests.support.ranks import run_ranks

FAMILIES = ("GPT-2", "GPT-NeoX", "Mixtral", "Qwen2, tied")


def names(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def trained(request, tmp_path_factory):
    """Checkpoints, runs of one step from them, and the loss of each rank after it."""
    root = tmp_path_factory.mktemp("trained")
    folders = [save(family, root / family) for family in FAMILIES]
    ranks = run_ranks(2, one_step, folders, 2, request.param, root / "runs")
    for number, folder in enumerate(folders):
        settings = {"model": str(folder), "out": "", "data": {"train": ""}, "ds_config": {}}
        if request.param:
            settings["lora"] = {"r": LORA["r"], "target_modules": LORA["target_modules"], "alpha": 8}
        (root / "runs" / str(number) / "train.json").write_text(json.dumps(settings))
    return folders, root / "runs", [after for _, after, _, _ in ranks[0]]


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=FAMILIES)
def test_a_merged_model_computes_what_the_pipeline_did(trained, number, tmp_path):
    folders, runs, after = trained
    merge(runs / str(number), tmp_path / "merged")
    assert names(tmp_path / "merged") == names(folders[number])
    written = sorted(file.name for file in (tmp_path / "merged").glob("*") if "-of-" in file.name)
    # a layer without weights once left a gap in the numbers, as if a file were missing
    assert written == [f"model-{n + 1:05}-of-{len(written):05}.safetensors" for n in range(len(written))]
    model = load_model(tmp_path / "merged")
    losses = [run_model(model, *batch(number))["loss"].item() for number in range(MICRO_BATCHES)]
    assert sum(losses) / MICRO_BATCHES == pytest.approx(after[number], rel=1e-5)
    before = load_model(folders[number]).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_runs_that_are_not_complete_are_refused(trained, tmp_path):
    _, runs, _ = trained
    with pytest.raises(CompressionError, match="train.json: No such file"):
        merge(tmp_path, tmp_path / "merged")
    (tmp_path / "train.json").write_bytes((runs / "0" / "train.json").read_bytes())
    with pytest.raises(CompressionError, match="no complete checkpoint: latest is missing"):
        merge(tmp_path, tmp_path / "merged")
