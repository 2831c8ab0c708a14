"""Runs that `merge`, or a run that goes on, would take for something else are refused in one line."""

import resource
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ds_compress.cli import main
from ds_compress.hf.merge import _copy_configs, merge
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.hf.test_run_folder import allow_files_up_to
from tests.support.finetuning import change, finished_run, prepare, tokenizer
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


@pytest.fixture
def out(tmp_path):
    """A copy of the folder of a finished run, which trained adapters of all linear layers with r 8."""
    return shutil.copytree(finished_run().parent / "out", tmp_path / "out")


def refused(out, capsys):
    """What `merge` says."""
    assert main(["merge", str(out), "--to", str(out.parent / "merged")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


FEWER = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
OTHERS = {
    "fewer modules": (FEWER, "layer 0: the checkpoint also trained ['down_proj', 'gate_proj', 'k_proj', "),
    "another rank": ({"r": 4}, "layer 0: the checkpoint has another shape of ['down_proj', 'gate_proj', "),
    "no adapters": (None, "embedding: the checkpoint does not have ['model.model.embed_tokens.weight']; "),
}


@pytest.mark.parametrize(("lora", "expected"), OTHERS.values(), ids=OTHERS)
def test_other_adapters_than_those_of_the_checkpoint(out, capsys, lora, expected):
    """With fewer modules the other adapters were dropped, and the exit code was 0."""
    change(out / "train.json", lora=lora)
    assert f"-model_states.pt: lora: {expected}" in refused(out, capsys)


def test_a_run_goes_on_with_the_adapters_that_it_has(out):
    """Others were dropped, and new ones began with random weights."""
    path = change(out / "train.json", lora=FEWER, out=str(out), steps=8)
    first, second = run_ranks(2, lambda: refusal(FinetuneRun(read_settings(path)).resume))
    assert first.startswith("lora: layer 0: the checkpoint also trained ['down_proj', ")
    assert second.startswith("lora: layer 1: the checkpoint also trained ['down_proj', ")


def test_a_start_that_is_refused_leaves_the_settings_of_the_checkpoint(out, tmp_path):
    """It had written its own over them, so `merge` refused the run that was there."""
    other = change(Path(shutil.copy(out / "train.json", tmp_path)), lora=FEWER, out=str(out), steps=8)
    assert all(run_ranks(2, lambda: refusal(FinetuneRun(read_settings(other)).run)))
    merge(out, tmp_path / "merged")


def test_a_latest_that_names_no_checkpoint(out, capsys):
    """It was a traceback, or a layer was said to be missing."""
    (out / "latest").write_bytes(b"\xff\xfe")
    assert "latest: b'" in refused(out, capsys)


@pytest.mark.parametrize("content", [b"", b"\x80\x04 no pickle", b"PK\x03\x04 no archive"])
def test_a_layer_that_is_damaged(out, capsys, content):
    file = next((out / "step6").glob("layer_02-*"))
    file.write_bytes(content)
    assert refused(out, capsys).startswith(f"{file}: damaged: ")


def test_a_full_disk(out):
    """It was a traceback of safetensors."""
    for size in (100, 4_000, 10_000):
        (line,) = run_ranks(1, merge_with_limit, out, size)
        assert line.startswith(f"--to {out.parent / str(size)}: cannot be written: ")


def merge_with_limit(out, size):
    allow_files_up_to(size)
    try:
        return refusal(merge, out, out.parent / str(size))
    finally:
        allow_files_up_to(resource.RLIM_INFINITY)


def test_all_files_have_the_mode_of_new_files(out):
    """Weights of a merged model, and the tokens of a run, could be read by their owner alone."""
    merge(out, merged := out.parent / "merged")
    other = out.parent / "other"
    other.touch()
    tokens, weights = list(out.glob("data/*")), list(merged.rglob("*.safetensors"))
    assert {file.parent.name for file in weights} == {"merged", "adapter"} and len(tokens) == 2
    assert {file.stat().st_mode for file in (*tokens, *weights)} == {other.stat().st_mode}


def test_a_tokenizer_beside_another_model(tmp_path):
    """The merged model had the config.json of that model, which lay beside the tokenizer."""
    settings = read_settings(prepare(tmp_path, tokenizer=str(tmp_path / "other")))
    other = shutil.copytree(settings.model, tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    (other / "chat_template.jinja").write_text("theirs")
    (merged := tmp_path / "merged").mkdir()
    _copy_configs(settings, merged)
    assert (merged / "config.json").read_text() == (Path(settings.model) / "config.json").read_text()
    assert (merged / "chat_template.jinja").read_text() == "theirs"


def test_a_tokenizer_with_fewer_files_than_the_models(tmp_path):
    """The merged model had the chat template of the model's own tokenizer, and its added tokens."""
    settings = read_settings(prepare(tmp_path, tokenizer=str(tmp_path / "other")))
    (Path(settings.model) / "added_tokens.json").write_text('{"added": 30}')
    used = tokenizer()
    used.chat_template = None
    used.save_pretrained(tmp_path / "other")
    (merged := tmp_path / "merged").mkdir()
    _copy_configs(settings, merged)
    found = AutoTokenizer.from_pretrained(merged)
    assert found.chat_template is None and found.get_vocab() == used.get_vocab()
