"""What is wrong with train.json is said with its JSON path, what came and what is allowed."""

import json
import re

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.hf.settings import read_settings

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


@pytest.mark.parametrize("name", ["transformers.md", "two-machines.md"])
def test_the_lines_of_the_page(tmp_path, pytestconfig, name):
    """From a checkpoint to a merged model in at most 12 lines that are understood."""
    page = (pytestconfig.rootpath / "docs" / name).read_text()
    lines = re.search(r"```bash\n(.*?)\n```", page, re.DOTALL)[1]
    assert len(lines.splitlines()) <= 12
    (tmp_path / "train.json").write_text(re.search(r"<<'JSON'\n(.*?)\nJSON\n", lines, re.DOTALL)[1])
    settings = read_settings(tmp_path / "train.json")
    assert settings.stages == 2 and settings.lora
    Config(settings.ds_config["ds_compress"])
