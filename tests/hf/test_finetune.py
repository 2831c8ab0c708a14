"""Fine-tuning as a user does it: through each launcher, in bf16, resumed, and merged in the end."""

import re

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds_compress.cli import main
from ds_compress.hf.merge import merge
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support import finetuning
from tests.support.finetuning import copy_of, finished_run, losses, perplexities, prepare
from tests.support.interpreters import TRAINING, interpreter
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def run():
    """train.json of a finished run, and what the run said."""
    path = finished_run()
    return path, (path.parent / "output").read_text()


def test_perplexity_falls_and_progress_is_told(run):
    path, output = run
    before, after = perplexities(output)
    assert after < 0.95 * before
    lines = [line for line in output.splitlines() if line.startswith("training:")]
    assert len(lines) == 6
    last = r"training: 6/6 steps, 00:00 left loss=\d\.\d{4} tokens/s=\d+ ratio=3\.\d\dx"
    assert re.fullmatch(last, lines[-1])
    assert sorted(losses(path.parent / "out")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
@pytest.mark.extended
def test_every_launcher_trains_the_same(run, tmp_path, launcher):
    path, output = run
    copy = copy_of(path, tmp_path / "copy")
    done = finetuning.finetune(launcher, copy, python=interpreter(TRAINING))
    assert perplexities(done.stderr) == perplexities(output)
    assert losses(copy.parent / "out") == losses(path.parent / "out")


def test_the_merged_model_has_the_same_perplexity(run, tmp_path, capsys):
    path, output = run
    merged = tmp_path / "merged"
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 0
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert finetuning.perplexity(path, plain) == pytest.approx(perplexities(output)[1], rel=1e-5)

    base = AutoModelForCausalLM.from_pretrained(path.parent / "model")
    adapted = PeftModel.from_pretrained(base, str(merged / "adapter"))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(adapted(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 2
    assert capsys.readouterr().err.endswith(f"--to {merged}: the folder is not empty\n")


STEPS = 8
# a step is too small to move a norm in bf16, several together are not
ADAM = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}


def trained(path, steps):
    """Weights of this rank's stage after `steps`, by their names in the model."""
    run = FinetuneRun(read_settings(path).model_copy(update={"steps": steps}))
    run.run()
    parts = [part for part in run.engine.module.children() if hasattr(part, "model")]
    return {name: p.detach().clone() for part in parts for name, p in part.model.named_parameters()}


def start(folder, steps, **changes):
    config = {**finetuning.DS_CONFIG, "optimizer": ADAM}
    path = prepare(folder, lora=None, save_every=STEPS // 2, eval_sequences=2, ds_config=config, **changes)
    weights = run_ranks(2, trained, path, steps)
    return path, weights[0] | weights[1]


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory):
    return start(tmp_path_factory.mktemp("bf16"), STEPS, dtype="bf16")


@pytest.mark.extended
def test_norms_move_and_losses_are_near_those_of_fp32(bf16_run, tmp_path):
    path, weights = bf16_run
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    assert len(norms) == 5
    assert {weight.dtype for weight in norms.values()} == {torch.bfloat16}
    assert all((weight != 1).any() for weight in norms.values())
    exact, _ = start(tmp_path / "fp32", STEPS, dtype="fp32")
    assert losses(path.parent / "out") == pytest.approx(losses(exact.parent / "out"), rel=0.01)


def test_a_resumed_run_and_a_merged_model_have_the_same_weights(bf16_run, tmp_path):
    path, weights = bf16_run
    resumed, _ = start(tmp_path / "resumed", STEPS // 2, dtype="bf16")
    again = run_ranks(2, trained, resumed, STEPS)
    assert losses(resumed.parent / "out") == losses(path.parent / "out")
    merge(resumed.parent / "out", tmp_path / "merged")
    files = (tmp_path / "merged").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for found in (again[0] | again[1], merged):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def train_in_fp16(path):
    """Perplexity of this rank's run, before and after."""
    get_accelerator().is_fp16_supported = lambda: True  # it computes, if slowly
    run = FinetuneRun(read_settings(path))
    before = run.perplexity()
    run.train()
    return before, run.perplexity()


@pytest.mark.parametrize("dtype", ["fp16", None])
@pytest.mark.extended(keep=1)
def test_weights_in_fp16_are_learned(tmp_path, dtype):
    """Without ZeRO, DeepSpeed divides gradients by a loss scale with which it has not multiplied the loss."""
    config = {**finetuning.DS_CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    config["fp16"] = {"enabled": True, "initial_scale_power": 12}
    sizes = {"steps": 12, "save_every": 0, "eval_sequences": 4, "stages": 1}
    path = prepare(tmp_path, dtype=dtype, lora=None, ds_config=config, **sizes)
    ((before, after),) = run_ranks(1, train_in_fp16, path)
    assert after < 0.8 * before


@pytest.mark.parametrize("lora", [{"r": 4}, None], ids=["adapters", "all weights"])
@pytest.mark.extended
def test_a_run_with_bf16_in_its_ds_config_goes_on(tmp_path, lora):
    """Of an fp32 checkpoint it could not: DeepSpeed cannot load what it saves of bf16 without ZeRO."""
    config = {**finetuning.DS_CONFIG, "bf16": {"enabled": True}}
    sizes = {"save_every": 2, "eval_sequences": 2, "stages": 1}
    whole = prepare(tmp_path / "whole", lora=lora, ds_config=config, **sizes)
    (weights,) = run_ranks(1, trained, whole, 4)
    resumed = prepare(tmp_path / "resumed", lora=lora, ds_config=config, **sizes)
    run_ranks(1, trained, resumed, 2)
    (again,) = run_ranks(1, trained, resumed, 4)
    assert losses(resumed.parent / "out") == losses(whole.parent / "out")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
