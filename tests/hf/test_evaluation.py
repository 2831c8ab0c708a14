"""Evaluation during a run: the best checkpoint, an early stop, and the schedule of the learning rate."""

import math
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from ds_compress.cli import main
from ds_compress.hf.settings import LearningRate, Settings, read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support.calls import wrapped
from tests.support.finetuning import BLOCK, DS_CONFIG, losses, prepare
from tests.support.offline_wandb import finish, keep_offline, read_offline
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

EVALUATED = {"lora": {"r": 4}, "eval_sequences": 4, "save_every": 0, "eval_every": 2}


def run(path, steps, perplexities=None):
    """Evaluations, best step, learning rate and number of steps on this rank."""
    done = FinetuneRun(read_settings(path).model_copy(update={"steps": steps}))
    if perplexities:
        given = iter(perplexities)
        done.perplexity = lambda: next(given)
    done.run()
    (rate,) = done.engine.get_lr()
    return done.evaluations, done._best_step, rate, done.engine.global_steps


def test_a_run_ends_when_it_learns_nothing_and_keeps_the_best(tmp_path, capsys):
    path = prepare(tmp_path, **{**EVALUATED, "eval_every": 1}, early_stop=2)
    given = [9.0, 5.0, 4.0, 4.5, 4.2, 9.0]  # before, after steps 1 to 4, after
    first, second = run_ranks(2, run, path, 20, given)
    assert first == second
    assert first[:2] == ({1: 5.0, 2: 4.0, 3: 4.5, 4: 4.2}, 2) and first[3] == 4
    out = tmp_path / "out"
    assert (out / "best").read_text() == "step2" and (out / "latest").read_text() == "step4"
    assert {folder.name for folder in out.glob("step*")} == {"step1", "step2", "step4"}
    assert run_ranks(2, run, path, 20, [4.2, 4.2])[0][3] == 4  # started again, it has ended already
    for name, options in (("best", ["--best"]), ("last", [])):
        assert main(["merge", str(out), "--to", str(tmp_path / name), *options]) == 0
    file = "adapter/adapter_model.safetensors"
    best, last = (load_file(tmp_path / name / file) for name in ("best", "last"))
    assert best.keys() == last.keys()
    assert not any(torch.equal(best[name], last[name]) for name in best)


def test_a_perplexity_that_is_nan_is_not_the_best():
    """A first one that was nan stayed the best, so `best` had its weights, and `early_stop` ended the run."""
    run = object.__new__(FinetuneRun)
    run.evaluations = {2: math.nan, 4: 9.0, 6: 7.0, 8: math.nan}
    run.settings = Settings.model_construct(early_stop=2)
    assert run._best_step == 6 and not run._has_stopped
    run.evaluations = {2: math.nan, 4: math.nan, 6: math.nan}
    assert run._best_step == 2 and run._has_stopped


class Counted(dict):
    """Perplexities by step; counts how often one is read."""

    reads = 0

    def __getitem__(self, step):
        self.reads += 1
        return super().__getitem__(step)


@pytest.mark.parametrize("early_stop", [None, 5])
def test_a_step_does_not_take_longer_after_many_evaluations(early_stop):
    """Each step asked twice whether the run has stopped, with or without `early_stop`, and each answer looked
    for the best of all evaluations once for each of them: after a thousand, 0.8 s in every step."""
    run = object.__new__(FinetuneRun)
    run.evaluations = Counted({step: 1.0 / step for step in range(1, 1001)})
    run.settings = Settings.model_construct(early_stop=early_stop)
    assert not run._has_stopped
    assert run.evaluations.reads <= 2 * len(run.evaluations)


@pytest.mark.extended
def test_evaluations_and_schedules_survive_a_stop(tmp_path):
    """A run in two parts has the losses, evaluations and rates of a whole one."""
    schedule = {"name": "cosine", "warmup_steps": 2}
    whole = prepare(tmp_path / "whole", **EVALUATED, lr_schedule=schedule)
    expected = run_ranks(2, run, whole, 6)
    parts = prepare(tmp_path / "parts", **{**EVALUATED, "save_every": 3}, lr_schedule=schedule)
    run_ranks(2, stopped_after, parts, 3)
    assert run_ranks(2, run, parts, 6) == expected
    assert losses(parts.parent / "out") == losses(whole.parent / "out")
    plain = prepare(tmp_path / "plain", **EVALUATED)
    run_ranks(2, run, plain, 2)
    first, constant = losses(whole.parent / "out"), losses(plain.parent / "out")
    assert first[1] == constant[1] and first[2] != constant[2]  # the warm-up begins at 0
    assert expected[0][2] == pytest.approx(0, abs=1e-9)  # the cosine has come to its end


def run_both_ways(path):
    """What is said of the last evaluation, and its losses with and without compression."""
    done = FinetuneRun(read_settings(path))
    done.run()
    return done._format(done.perplexity()), done.engine.ds_compress.eval_losses


def test_perplexity_is_told_with_compression_and_without(tmp_path):
    """Only the losses were, and one of the perplexities."""
    block = {**BLOCK, "forward": {"codec": {"name": "quantize", "bits": 2}}, "eval": "both"}
    path = prepare(tmp_path, **{**EVALUATED, "steps": 1}, ds_config={**DS_CONFIG, "ds_compress": block})
    first, second = run_ranks(2, run_both_ways, path)
    assert first == second
    line, losses = first
    on, off = (math.exp(losses[mode]) for mode in ("compressed", "uncompressed"))
    assert line == f"{on:.4f} ({on:.4f} compressed, {off:.4f} uncompressed)" and on != off


def run_with_wandb(path):
    """Run two steps; DeepSpeed starts W&B on rank 0 alone."""
    run(path, 2)
    finish()


@pytest.mark.extended
def test_wandb_gets_settings_and_results(tmp_path, monkeypatch):
    keep_offline(tmp_path, monkeypatch)
    block = {**BLOCK, "monitor": {"every": 1}}
    config = {**DS_CONFIG, "ds_compress": block, "wandb": {"enabled": True, "project": "tests"}}
    run_ranks(2, run_with_wandb, prepare(tmp_path, **EVALUATED, ds_config=config))
    _, settings, summary = read_offline(tmp_path)
    assert settings["train"]["lora"]["r"] == 4 and "forward" in settings["ds_compress"]
    assert 1 < summary["perplexity_after"] < summary["perplexity_before"]
    assert re.match(r"ds_compress: .* sent instead of .* by step 2", summary["report"])


def test_wandb_without_a_login_is_said_on_every_rank(tmp_path, monkeypatch):
    """It fails on rank 0 alone, inside DeepSpeed: the other blamed a connection, or would wait (NCCL)."""
    keep_offline(tmp_path, monkeypatch)
    for name, value in (("WANDB_MODE", "online"), ("NETRC", "nowhere"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    path = prepare(tmp_path, ds_config={**DS_CONFIG, "ds_compress": BLOCK, "wandb": {"enabled": True}})
    first, second = run_ranks(2, lambda: refusal(FinetuneRun, read_settings(path)))
    assert first.startswith("train.json.ds_config.wandb: UsageError: No API key configured.")
    assert second == f"{first} [rank 0]"


def test_wandb_that_is_off_need_not_be_installed(tmp_path, monkeypatch):
    """A config with `"wandb": {"enabled": false}` ended with "No module named 'wandb'"."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = {**DS_CONFIG, "ds_compress": BLOCK, "wandb": {"enabled": False}}
    run_ranks(1, run, prepare(tmp_path, stages=1, eval_sequences=1, ds_config=config), 1)


def test_a_warmup_may_be_a_share_of_the_steps():
    for given, expected in ((0, 0), (3, 3), (1, 1), (0.1, 2), (0.06, 2)):
        assert LearningRate(name="cosine", warmup_steps=given).count_warmup_steps(20) == expected


def stopped_after(path, steps):
    """Save after so many steps of 6, and end as if killed."""
    done = FinetuneRun(read_settings(path).model_copy(update={"steps": 6}))

    def stop():
        if done.engine.global_steps == steps:
            raise KeyboardInterrupt

    done._save = wrapped(done._save, after=stop)
    with pytest.raises(KeyboardInterrupt):
        done.run()
