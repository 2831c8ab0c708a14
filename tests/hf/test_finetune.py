"""Fine-tuning as a user does it: through each launcher, killed in the middle, and merged in the end."""

import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ds_compress.cli import main
from tests.support.finetuning import copy_of, finetune, losses, perplexities, perplexity, plain_run
from tests.support.interpreters import TRAINING, interpreter


@pytest.fixture(scope="module")
def run():
    """train.json of a finished run, and what the run said."""
    path = plain_run()
    return path, (path.parent / "output").read_text()


def test_perplexity_falls_and_progress_is_told(run):
    path, output = run
    before, after = perplexities(output)
    assert after < 0.95 * before
    lines = [line for line in output.splitlines() if line.startswith("training:")]
    assert len(lines) == 6
    assert re.fullmatch(
        r"training: 6/6 steps, 0:00 left loss=\d\.\d{4} tokens/s=\d+ ratio=3\.\d\dx", lines[-1]
    )
    assert re.search(r"sample: 'the cat( \S+){24}'", output)
    assert sorted(losses(path.parent / "out")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
@pytest.mark.extended(keep=1)
def test_every_launcher_trains_the_same(run, tmp_path, launcher):
    path, output = run
    copy = copy_of(path, tmp_path / "copy")
    assert perplexities(finetune(launcher, copy, python=interpreter(TRAINING)).stderr) == perplexities(output)
    assert losses(copy.parent / "out") == losses(path.parent / "out")


def test_the_merged_model_has_the_same_perplexity(run, tmp_path, capsys):
    path, output = run
    merged = tmp_path / "merged"
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 0
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert perplexity(path, plain) == pytest.approx(perplexities(output)[1], rel=1e-5)

    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path.parent / "model"), str(merged / "adapter")
    )
    ids = torch.arange(20)[None]
    torch.testing.assert_close(adapted(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 2
    assert capsys.readouterr().err.endswith(f"--to {merged}: the folder is not empty\n")
