"""ds_config.json as DeepSpeed reads it: what `check` says of a file holds for the run."""

import json

import deepspeed
import pytest

from ds_compress.cli.check import read_block
from ds_compress.errors import CompressionError

FILES = {
    "plain": '{"train_batch_size": 1, "ds_compress": {"seed": 1}}',
    "comments": """{
        // of one line
        # of the other kind
        "train_batch_size": 1, /* of several
        lines */
        "ds_compress": {"seed": 1}
    }""",
    "trailing commas": '{"train_batch_size": 1, "ds_compress": {"seed": 1,},}',
    "no quotes": "{train_batch_size: 1\nds_compress: {seed: 1}}",
    "no braces": 'train_batch_size: 1\n"ds_compress": {"seed": 1}',
    "a word": '{"train_batch_size": 1, "ds_compress": {"seed": 1, "eval": compressed\n}}',
    "not finite": '{"train_batch_size": 1, "ds_compress": {"link": {"timeout_s": NaN\n}}}',
    "twice": '{"train_batch_size": 1, "ds_compress": {"seed": 1}, "ds_compress": {"seed": 2}}',
    "twice inside": '{"train_batch_size": 1, "ds_compress": {"seed": 1, "seed": 2}}',
    "cut": '{"train_batch_size": 1, "ds_compress": {"seed": 1',
    "empty": "",
    "list": "[1, 2]",
    "binary": "\x00\x01\udcff",
    "deep": "[" * 100_000,
}


def outcome(read):
    try:
        return read()
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, AssertionError) as error:
        return type(error)


@pytest.mark.parametrize("name", FILES)
def test_read_as_deepspeed_does(tmp_path, name):
    """Comments once were refused here and accepted there, keys that come twice the other way round."""
    file = tmp_path / "ds_config.json"
    file.write_text(FILES[name], errors="surrogateescape")
    theirs = outcome(lambda: deepspeed.DeepSpeedConfig(str(file))._param_dict["ds_compress"])
    if isinstance(theirs, dict):
        assert read_block(file) == theirs
    else:
        with pytest.raises(CompressionError) as caught:
            read_block(file)
        assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_what_the_corpus_holds(tmp_path):
    """Comments are accepted, and keys that come twice are refused with their name."""
    file = tmp_path / "ds_config.json"
    file.write_text(FILES["comments"])
    assert read_block(file) == {"seed": 1}
    file.write_text(FILES["twice inside"])
    with pytest.raises(CompressionError, match=r"not JSON as DeepSpeed reads it: .*\['seed'\]"):
        read_block(file)


def test_every_recipe_is_plain_json(tmp_path, pytestconfig):
    for path in (pytestconfig.rootpath / "ds_configs").glob("*.json"):
        assert read_block(path) == json.loads(path.read_text())["ds_compress"]
