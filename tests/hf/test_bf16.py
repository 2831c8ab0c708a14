"""Parameters in bf16: steps are added up in fp32, or a step of 2e-4 is lost at weights near 1."""

import pytest
import torch
from safetensors.torch import load_file

from ds_compress.hf.merge import merge
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support.finetuning import losses, prepare
from tests.support.ranks import run_ranks

STEPS = 40
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 100000,
    "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "torch_adam": True}},
}


def trained(path, steps):
    """Weights of this rank's stage after `steps`, by their names in the model."""
    run = FinetuneRun(read_settings(path).model_copy(update={"steps": steps}))
    run.run()
    parts = [part for part in run.engine.module.children() if hasattr(part, "model")]
    return {name: p.detach().clone() for part in parts for name, p in part.model.named_parameters()}


def start(folder, steps, **changes):
    path = prepare(folder, lora=None, save_every=STEPS // 2, eval_sequences=2, ds_config=DS_CONFIG, **changes)
    (folder / "out").mkdir()
    weights = run_ranks(2, trained, path, steps)
    return path, weights[0] | weights[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return start(tmp_path_factory.mktemp("bf16"), STEPS, dtype="bf16")


def test_norms_move_and_losses_are_near_those_of_fp32(run, tmp_path):
    path, weights = run
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    assert len(norms) == 5
    for name, weight in norms.items():
        assert weight.dtype == torch.bfloat16
        assert (weight != 1).any(), name
    exact, _ = start(tmp_path / "fp32", STEPS, dtype="fp32")
    ours, expected = losses(path.parent / "out"), losses(exact.parent / "out")
    assert [ours[step] for step in ours] == pytest.approx([expected[step] for step in ours], rel=0.01)


def test_a_resumed_run_and_a_merged_model_have_the_same_weights(run, tmp_path):
    path, weights = run
    resumed, _ = start(tmp_path / "resumed", STEPS // 2, dtype="bf16")
    again = run_ranks(2, trained, resumed, STEPS)
    assert losses(resumed.parent / "out") == losses(path.parent / "out")
    merge(resumed.parent / "out", tmp_path / "merged")
    files = (tmp_path / "merged").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for found in (again[0] | again[1], merged):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
