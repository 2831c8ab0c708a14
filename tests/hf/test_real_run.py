"""From a `save_pretrained` checkpoint to a merged model: LoRA, each launcher, kills, Transformers, peft.

With real text: `DS_COMPRESS_DATA=FOLDER pytest -m slow tests/hf/test_real_run.py`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from launch.ports import reserved_port
from tests.support.finetuning import (
    command,
    copy_of,
    environment,
    finetune,
    losses,
    material,
    perplexities,
    perplexity_of_folder,
)

pytestmark = pytest.mark.slow

LENGTH, STEPS, SAVE_EVERY = 64, 36, 5
COMPRESSED = {
    "forward": {"codec": {"name": "quantize", "bits": 4, "hadamard": True}},
    "backward": {"codec": {"name": "quantize", "bits": 8}},
    "eval": "uncompressed",
}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 100000,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "ds_compress": COMPRESSED,
}


def merge(out: Path, to: Path) -> Path:
    words = [sys.executable, "-m", "ds_compress", "merge", str(out), "--to", str(to)]
    subprocess.run(words, check=True, env=environment())
    return to


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """train.json of a training of all parameters, texts beside it; what the run said; the merged model."""
    folder = tmp_path_factory.mktemp("pretrained")
    found = material()
    for name in ("first", "second", "held_out"):
        (folder / f"{name}.txt").write_text(getattr(found, name))
    torch.manual_seed(7)
    end = found.tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(found.tokenizer),
        n_positions=LENGTH,
        n_embd=found.width,
        n_layer=4,
        n_head=4,
        bos_token_id=end,
        eos_token_id=end,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
    found.tokenizer.save_pretrained(folder / "random")
    settings = {
        "model": str(folder / "random"),
        "out": str(folder / "out"),
        "data": {"train": str(folder / "first.txt"), "eval": str(folder / "held_out.txt")},
        "sequence_length": LENGTH,
        "steps": 4 * STEPS,
        "ds_config": DS_CONFIG,
        "eval_sequences": 32,
    }
    path = folder / "train.json"
    path.write_text(json.dumps(settings))
    output = finetune("torchrun", path).stderr
    return path, output, merge(folder / "out", folder / "merged")


def adapted(pretrained, folder: Path, **changes):
    """train.json of a LoRA run on other text, and what the run said."""
    before, _, merged = pretrained
    settings = json.loads(before.read_text()) | {
        "model": str(merged),
        "out": str(folder / "out"),
        "data": {"train": str(before.parent / "second.txt"), "eval": str(before.parent / "held_out.txt")},
        "lora": {"r": 8, "dropout": 0.05},
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        **changes,
    }
    path = folder / "train.json"
    path.write_text(json.dumps(settings))
    return path, finetune("torchrun", path).stderr


@pytest.fixture(scope="module")
def uninterrupted(pretrained, tmp_path_factory):
    return adapted(pretrained, tmp_path_factory.mktemp("adapted"))


def killed(launcher: str, path: Path, after: int, victim: int | None) -> list[int]:
    """Kill all processes, or rank `victim`, after `after` steps; return the steps logged by then."""
    out = path.parent / "out"
    with reserved_port() as port, (path.parent / "log").open("w") as log:
        process = psutil.Popen(
            command(launcher, port, [str(path)]), stdout=log, stderr=log, env=environment()
        )
        while not (out / "losses.jsonl").exists() or max(losses(out), default=0) < after:
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            time.sleep(0.01)
        started = [*process.children(recursive=True), process]
        for each in started:
            if victim is None or _rank(each) == victim:
                each.kill()
        assert process.wait(timeout=900) != 0
        _, left = psutil.wait_procs(started, timeout=900)
        assert not left
    return sorted(losses(out))


def _rank(process: psutil.Process) -> int | None:
    """Of a training process; None of a launcher."""
    rank = process.environ().get("RANK")
    return None if rank is None else int(rank)


def test_perplexity_falls_when_all_parameters_are_trained(pretrained):
    path, output, merged = pretrained
    before, after = perplexities(output)
    assert after < 0.6 * before
    assert perplexity_of_folder(path, merged) == pytest.approx(after, rel=1e-5, abs=1e-4)


def test_perplexity_falls_from_there_when_adapters_are(pretrained, uninterrupted):
    before, after = perplexities(uninterrupted[1])
    assert before == pytest.approx(perplexities(pretrained[1])[1], rel=1e-5, abs=1e-4)
    assert after < 0.99 * before


@pytest.mark.parametrize(("launcher", "victim"), [("deepspeed", 0), ("torchrun", 1), ("accelerate", 0)])
def test_killed_and_started_again_it_is_as_if_nothing_had_been(uninterrupted, tmp_path, launcher, victim):
    """Killed twice, one rank and then all, the run has the losses, bit by bit, of an uninterrupted one."""
    path, after, merged = kill_twice_and_merge(uninterrupted, tmp_path, launcher, victim)
    model = Path(json.loads(path.read_text())["model"])
    adapter = perplexity_of_folder(path, model, merged / "adapter")
    assert adapter == pytest.approx(after, rel=1e-5, abs=1e-4)


def test_killed_over_4_bits_it_is_as_if_nothing_had_been(pretrained, tmp_path):
    """The base is quantized again at each start."""
    (tmp_path / "whole").mkdir()
    kill_twice_and_merge(adapted(pretrained, tmp_path / "whole", quantize="nf4"), tmp_path, "torchrun", 1)


def kill_twice_and_merge(
    uninterrupted: tuple[Path, str], folder: Path, launcher: str, victim: int
) -> tuple[Path, float, Path]:
    """Compare the run, killed twice, with `uninterrupted`; return its train.json, perplexity and model."""
    path = copy_of(uninterrupted[0], folder / "killed")
    out = path.parent / "out"
    expected = losses(uninterrupted[0].parent / "out")
    done = killed(launcher, path, STEPS // 3, victim)
    assert done[-1] < STEPS
    done = killed(launcher, path, max(2 * STEPS // 3, done[-1] + 1), None)
    assert done[-1] < STEPS
    output = finetune(launcher, path).stderr
    assert "goes on from step" in output
    assert losses(out) == expected
    rows = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert all(row["loss"] == expected[row["step"]] for row in rows)
    after = perplexities(output)[1]
    assert after == perplexities(uninterrupted[1])[1]
    merged = merge(out, folder / "merged")
    assert perplexity_of_folder(path, merged) == pytest.approx(after, rel=1e-5, abs=1e-4)
    return path, after, merged
