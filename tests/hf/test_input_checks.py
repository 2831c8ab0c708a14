"""What a run cannot do, or train.json gets wrong, is refused in one line, before anything is built."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import AutoTokenizer

from ds_compress.config import Config
from ds_compress.hf.finetune import main
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from ds_compress.hf.transformers_pipeline import read_config
from launch.ports import reserved_port
from tests.support.finetuning import DS_CONFIG, change, environment, perplexities, prepare, text
from tests.support.interpreters import interpreter
from tests.support.ranks import once, run_ranks
from tests.support.refusals import refusal


def refused(path):
    return refusal(lambda: FinetuneRun(read_settings(path)))


def refused_each(path, changes):
    """What a rank says to that train.json with each of these changes."""
    folder = path.parent / "changed"
    for each in (folder, path.parent / "out"):
        each.mkdir()
    return [refused(change(Path(shutil.copy(path, folder)), stages=1, **each)) for each in changes]


def refused_with(path, **changes):
    """What a run says to that train.json, changed."""
    ((line,),) = run_ranks(1, refused_each, path, [changes])
    return line


@pytest.fixture
def path(tmp_path):
    """train.json of a run that has a folder to itself."""
    folder = shutil.copytree(once("prepared", prepare), tmp_path / "run")
    return change(folder / "train.json", out=str(folder / "out"))


ONE_SCHEDULE = {"lr_schedule": {"name": "linear"}}
ANOTHER_SCHEDULE = {"ds_config": {**DS_CONFIG, "scheduler": {"type": "WarmupLR", "params": {}}}}
REFUSED = {
    # sequences longer than the position table once ended in IndexError and a lost peer
    "sequence_length: 65 is not allowed: the model's config.json has "
    '"max_position_embeddings" for 64 tokens; should be at most that': {"sequence_length": 65},
    'dtype: "fp16" needs "fp16": ': {"dtype": "fp16", "lora": None},
    # with fp16 switched off it was trained without loss scaling, and without fp32 weights
    'dtype: "fp16" needs "fp16": {"enabled": true} in': {
        "dtype": "fp16",
        "lora": None,
        "ds_config": {**DS_CONFIG, "fp16": {"enabled": False}},
    },
    "early_stop: counts evaluations, but eval_every is 0; set both": {"early_stop": 2},
    'lr_schedule: ds_config has a "scheduler", too; leave one of the two': ONE_SCHEDULE | ANOTHER_SCHEDULE,
}
"""Changes of train.json that are refused, by the line that names the fault."""
OF_DEEPSPEED = {
    # it was an assertion inside DeepSpeed, after the model had been read
    ".zero_optimization.stage: 2 is not allowed: DeepSpeed's": {"zero_optimization": {"stage": 2}},
    # Trainer's word for a number that it works out; DeepSpeed compared it with integers
    ".train_micro_batch_size_per_gpu: 'auto' is not allowed": {"train_micro_batch_size_per_gpu": "auto"},
    # DeepSpeed took it for 1, and numpy ended the first evaluation in a traceback
    ".train_micro_batch_size_per_gpu: True is not allowed: should": {"train_micro_batch_size_per_gpu": True},
    ".gradient_accumulation_steps: True is not allowed": {"gradient_accumulation_steps": True},
    ".optimizer.params.lr: 'auto' is": {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
    ".optimizer.type: 'AdamX' is not allowed (did you mean 'Adam'?)": {"optimizer": {"type": "AdamX"}},
    ".optimizer.type: None is not allowed": {"optimizer": None},
    ": TypeError: SGD.__init__() got an unexpected": {"optimizer": {"type": "SGD", "params": {"beta": 1}}},
}
REFUSED |= {f"ds_config{said}": {"ds_config": DS_CONFIG | changes} for said, changes in OF_DEEPSPEED.items()}


def test_refusals(path):
    (lines,) = run_ranks(1, refused_each, path, [*REFUSED.values()])
    for line, said in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"train.json.{said}")


def test_a_model_that_is_not_there(path):
    """It was said of the tokenizer, which was looked for first, that the hub could not be reached."""
    said = "nowhere: model.safetensors is missing; should be the folder of a "
    assert refused_with(path, model="nowhere").startswith(said)


def test_what_transformers_says_in_several_lines(path, tmp_path):
    """Their first line ends with a colon: what was wrong was left out."""
    folders = [shutil.copytree(path.parent / "model", tmp_path / name) for name in ("config", "tokenizer")]
    change(folders[0] / "config.json", vocab_size="96")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders[1] / name).unlink()
    ((config, tokenizer),) = run_ranks(1, refused_each, path, [{"model": str(each)} for each in folders])
    said = "Validation error for field 'vocab_size': TypeError: Field 'vocab_size' expected int, got str"
    assert config.startswith(f"{folders[0]}: ") and said in config
    assert tokenizer.startswith(f"train.json.tokenizer: {folders[1]}: ") and "(1) a `tokenizers`" in tokenizer


def test_a_model_with_code_of_its_own(tmp_path, monkeypatch):
    """Every rank asked on the terminal whether to run it, and waited 15 seconds."""
    monkeypatch.setattr("builtins.input", pytest.fail)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(read_config, tmp_path).startswith(f"{tmp_path}: ValueError: The repository {tmp_path} con")


def cut(file):
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": cut,
    "random bytes": lambda file: file.write_bytes(bytes(range(256)) * 20),
    "a folder": lambda file: file.unlink() or file.mkdir(),
    "a pickle": lambda file: torch.save({"weight": torch.ones(3)}, file),
    "another index": lambda file: file.with_name(f"{file.name}.index.json").write_text('{"weights": {}}'),
}


def test_weights_that_are_damaged(path, tmp_path):
    """Each was a traceback of safetensors, once the data had been read."""
    models = [shutil.copytree(path.parent / "model", tmp_path / name) for name in DAMAGES]
    for model, damage in zip(models, DAMAGES.values()):
        damage(model / "model.safetensors")
    (lines,) = run_ranks(1, refused_each, path, [{"model": str(model)} for model in models])
    reason = "(.index.json is damaged: KeyError| is no whole safetensors file: )"
    for model, line in zip(models, lines, strict=True):
        assert re.match(f"{model}/model.safetensors{reason}", line)


def test_what_one_rank_refuses_is_said_by_the_others(path, tmp_path):
    """They printed gloo's "Connection closed by peer", or waited."""
    model = shutil.copytree(path.parent / "model", tmp_path / "model")
    cut(model / "model.safetensors")
    first, second = run_ranks(2, refused_on_rank, path, {"model": str(model)})
    assert second.startswith(f"{model}/model.safetensors is no whole safetensors file: ")
    assert first == f"{second} [rank 1]"
    (tmp_path / "text.txt").write_bytes(b"\xff" * 999)
    first, second = run_ranks(2, refused_on_rank, path, {"data": {"train": str(tmp_path / "text.txt")}}, 0)
    assert re.match(r"data: '.* cannot be read: UnicodeDecodeError: ", first)
    assert second == f"{first} [rank 0]"


def test_tokens_of_another_vocabulary(path, tmp_path):
    """A token that was added to the tokenizer and not to the model."""
    known = AutoTokenizer.from_pretrained(path.parent / "model")
    known.add_tokens([f"new{number}" for number in range(20)])
    known.save_pretrained(tmp_path / "other")
    (tmp_path / "text.txt").write_text(text(20) + "\n\nnew19 " + text(20))
    data = {"train": str(tmp_path / "text.txt")}
    assert refused_with(path, tokenizer=str(tmp_path / "other"), data=data) == (
        f"train.json.tokenizer: {tmp_path / 'other'}: it made a token 42, but the model's vocabulary has 32; "
        "should be the tokenizer that the model was trained with"
    )


def code_and_output(path):
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        return main([str(path)]), output.getvalue()


def test_machines_with_other_settings_or_other_text(path, tmp_path):
    """Other numbers of steps would hang ranks; labels of another text would be learned. The folder of a
    monitor is a path like "out", and was compared."""
    said = "train.json.steps differs between ranks 0 and 1; should be equal on all machines"
    here, there = (
        {**DS_CONFIG, "csv_monitor": {"enabled": True, "output_path": where}} for where in ("here", "there")
    )
    change(path, ds_config=here)
    assert run_ranks(2, refused_on_rank, path, {"steps": 7, "ds_config": there}) == [said, said]
    (tmp_path / "text.txt").write_text(text(121))
    first, second = run_ranks(2, refused_on_rank, path, {"data": {"train": str(tmp_path / "text.txt")}})
    assert first == second
    assert first.startswith("train.json.data: the text, or what the tokenizer makes of it, differs between")


def refused_on_rank(path, changes, other=1):
    """What this rank says if rank `other` has other settings."""
    own = Path(shutil.copy(path, path.with_name(f"rank{distributed.get_rank()}.json")))
    change(own, **(changes if distributed.get_rank() == other else {}))
    (path.parent / "out").mkdir(exist_ok=True)
    return refused(own).replace(own.name, "train.json")


def start_with_own_file(path):
    return code_and_output(path.with_name("none.json") if distributed.get_rank() else path)


def test_settings_that_one_machine_alone_refuses(path):
    """The others printed gloo's "Connection closed by peer", or waited for a machine that had ended. Too many
    stages were once an assertion inside DeepSpeed, in a traceback of every rank."""
    first, second = run_ranks(2, refused_on_rank, path, {"stages": 3})
    assert second == (
        "train.json.stages: 3 is not allowed: 2 processes were started; their number should be a multiple of "
        "the number of stages"
    )
    assert first == f"{second} [rank 1]"
    said = f"{path.with_name('none.json')}: No such file or directory"
    assert run_ranks(2, start_with_own_file, path) == [(2, f"{said} [rank 1]\n"), (2, f"{said}\n")]


@pytest.mark.extended
def test_without_the_extra_it_says_what_to_install(path):
    """It was once a traceback of imports."""
    program = (
        f"import runpy, sys; sys.modules['peft'] = None; sys.argv = ['finetune', {str(path)!r}]; "
        "runpy.run_module('ds_compress.hf.finetune', run_name='__main__')"
    )
    done = subprocess.run([interpreter(), "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith('; pip install "ds_compress[hf]"')


WHOLE = {"model": "m", "out": "o", "data": {"train": "t.txt"}, "ds_config": {"train_batch_size": 4}}


def test_what_is_left_out_has_a_default(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(WHOLE))
    settings = read_settings(tmp_path / "train.json")
    assert (settings.stages, settings.lora, settings.sequence_length) == (2, None, 1024)
    (tmp_path / "again.json").write_text(settings.model_dump_json())
    assert read_settings(tmp_path / "again.json") == settings


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sequence_lenght": 8}, "train.json.sequence_lenght: unknown key (did you mean 'sequence_length'?)"),
        ({"lora": {"rank": 8}}, "train.json.lora.rank: unknown key; allowed: r, alpha, dropout"),
        ({"out": "a\0b"}, "train.json.out: 'a\\x00b' is not allowed: should be text without NUL"),
        ({"model": "a \ud800"}, "train.json.model: 'a \\ud800' is not allowed: should be text without"),
        ({"dtype": "bf61"}, "train.json.dtype: 'bf61' is not allowed (did you mean 'bf16'?)"),
        (
            {"data": {"train": "t", "packing": "off"}},
            "train.json.data.packing: 'off' is not allowed; allowed: ",
        ),
    ],
)
def test_errors_name_the_place(tmp_path, change, expected):
    (tmp_path / "train.json").write_text(json.dumps(WHOLE | change))
    assert refusal(read_settings, tmp_path / "train.json").startswith(expected)


def test_files_that_are_not_json_are_refused(tmp_path):
    (tmp_path / "train.json").write_text("{")
    assert "train.json: not JSON: Expecting" in refusal(read_settings, tmp_path / "train.json")
    assert "none.json: No such file or directory" in refusal(read_settings, tmp_path / "none.json")


def read_lines(pytestconfig, name, number=0):
    """Return a block of lines to paste, of a page."""
    page = (pytestconfig.rootpath / "docs" / name).read_text()
    return re.findall(r"```bash\n(.*?)\n```", page, re.DOTALL)[number]


@pytest.mark.parametrize("name", ["transformers.md", "two-machines.md"])
def test_the_lines_of_the_page(tmp_path, pytestconfig, name):
    """From a checkpoint to a merged model in at most 12 lines that are understood."""
    lines = read_lines(pytestconfig, name)
    assert len(lines.splitlines()) <= 12
    (tmp_path / "train.json").write_text(re.search(r"<<'JSON'\n(.*?)\nJSON\n", lines, re.DOTALL)[1])
    settings = read_settings(tmp_path / "train.json")
    assert settings.stages == 2 and settings.lora
    Config(settings.ds_config["ds_compress"])


@pytest.mark.extended
def test_the_lines_for_one_machine_make_a_merged_model(tmp_path, pytestconfig):
    """A new user pastes them, in a folder with a model and a text."""
    model = prepare(tmp_path).parent / "model"
    change(model / "config.json", max_position_embeddings=512)
    model.rename(tmp_path / "MODEL")
    documents = text(500).split("\n\n")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    lines = read_lines(pytestconfig, "transformers.md", 1).splitlines()
    assert len(lines) <= 12 and lines[0].startswith("pip install ")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with reserved_port() as port:
        script = "\n".join(lines[1:]).replace("--num_gpus", f"--master_port {port} --num_gpus")
        own = environment() | {"PATH": path}
        command = ["bash", "-e", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "LlamaForCausalLM" in done.stdout
    before, after = perplexities(done.stderr + done.stdout)
    assert after < before
    assert (tmp_path / "merged" / "adapter" / "adapter_model.safetensors").exists()
