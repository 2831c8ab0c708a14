"""What is wrong with train.json is said with its JSON path, what came and what is allowed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.hf.settings import read_settings
from launch.ports import reserved_port
from tests.support.finetuning import environment, perplexities, prepare, text

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
        ({"lora": {"r": 0}}, "train.json.lora.r: 0 is not allowed: should be greater than or equal to 1"),
        ({"data": {}}, "train.json.data.train: missing"),
        ({"sequence_length": []}, "train.json.sequence_length: [] is not allowed: List should have at"),
        ({"steps": "ten"}, "train.json.steps: 'ten' is not allowed: should be a valid integer"),
        ({"dtype": "bf61"}, "train.json.dtype: 'bf61' is not allowed (did you mean 'bf16'?)"),
        (
            {"data": {"train": "t", "packing": "off"}},
            "train.json.data.packing: 'off' is not allowed; allowed: 'isolated', 'joined'",
        ),
    ],
)
def test_errors_name_the_place(tmp_path, change, expected):
    (tmp_path / "train.json").write_text(json.dumps(WHOLE | change))
    with pytest.raises(CompressionError) as error:
        read_settings(tmp_path / "train.json")
    assert str(error.value).startswith(expected)


def test_files_that_are_not_json_are_refused(tmp_path):
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(CompressionError, match="train.json: not JSON: Expecting"):
        read_settings(tmp_path / "train.json")
    with pytest.raises(CompressionError, match="none.json: No such file or directory"):
        read_settings(tmp_path / "none.json")


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
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    model.rename(tmp_path / "MODEL")
    documents = text(500).split("\n\n")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    lines = read_lines(pytestconfig, "transformers.md", 1).splitlines()
    assert len(lines) <= 12 and lines[0].startswith("pip install ")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with reserved_port() as port:
        done = subprocess.run(
            [
                "bash",
                "-e",
                "-c",
                "\n".join(lines[1:]).replace("--num_gpus", f"--master_port {port} --num_gpus"),
            ],
            cwd=tmp_path,
            env=environment() | {"PATH": path},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "LlamaForCausalLM" in done.stdout
    before, after = perplexities(done.stderr + done.stdout)
    assert after < before
    assert (tmp_path / "merged" / "adapter" / "adapter_model.safetensors").exists()
