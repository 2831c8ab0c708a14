"""`"recipe": "auto"` in a block: what it stands for, and what contradicts it."""

import itertools
import json

import jsonschema
import pytest
import torch

from ds_compress.cli import main
from ds_compress.config import KEY, Config
from ds_compress.config.recipes import DEFAULT, LIMITS
from ds_compress.errors import CompressionError
from ds_compress.simulate import simulate

AUTO = {"recipe": "auto"}


def test_one_key_is_enough():
    config = Config(AUTO)
    assert config.quality == DEFAULT and config.block.link.depth == "auto"
    assert config.codecs(0).settings == Config({}).codecs(0).settings
    assert Config({}).quality is None


@pytest.mark.parametrize("quality", LIMITS)
def test_every_class(quality):
    config = Config({**AUTO, "quality": quality, "link": {"depth": 2}, "warmup_steps": 9})
    assert (config.quality, config.block.link.depth, config.warmup_steps) == (quality, 2, 9)


def test_classes_are_in_order():
    limits = list(LIMITS.values())
    assert limits[0].forward == limits[0].backward == 0
    for mild, strong in itertools.pairwise(limits):
        assert mild.forward < strong.forward < 1 and mild.backward <= strong.backward < 1


def test_ranks_that_differ_are_found():
    """One machine may have the key, another not: with equal settings they would wait for each other."""
    others = [{}, {"link": {"depth": "auto"}}, {**AUTO, "quality": "aggressive"}]
    assert all(Config(other).settings != Config(AUTO).settings for other in others)


def test_what_is_adopted_is_the_block_without_the_name():
    config = Config({**AUTO, "seed": 3})
    other = config.changed({"boundaries": {"0": {"forward": {"codec": "bf16"}}}})
    assert other.codecs(0).forward.name == "bf16" and other.block.seed == 3
    assert config.adopt(other) and config.quality == DEFAULT
    assert config.changed({}).codecs(0).forward.name == "none"


@pytest.mark.parametrize(
    "block, message",
    [
        ({"quality": "safe"}, "ds_compress.quality: 'safe' is not allowed with no recipe 'auto'; allowed: a"),
        ({"recipe": "bf16", "quality": "safe"}, "ds_compress.quality: 'safe' is not allowed with no recipe"),
        ({**AUTO, "quality": "good"}, "ds_compress.quality: 'good'"),
        ({**AUTO, "quality": None}, "ds_compress.quality: None is not allowed with recipe 'auto'"),
        ({**AUTO, "forward": {"codec": "bf16"}}, "ds_compress.forward: is not allowed with recipe 'auto'"),
        ({**AUTO, "boundaries": {"0": {}}}, "ds_compress.boundaries: is not allowed with recipe 'auto'"),
        ({**AUTO, "link": {"mode": "blocking"}}, "ds_compress.link.mode: 'blocking' is not allowed with"),
        (
            {**AUTO, "policy": "accordion"},
            "ds_compress.policy: 'accordion' is not allowed with recipe 'auto'",
        ),
        ({"recipe": "autos"}, "ds_compress.recipe: 'autos' is not a recipe (did you mean 'auto'?)"),
    ],
)
def test_contradictions(block, message):
    with pytest.raises(CompressionError) as caught:
        Config(block)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_it_is_not_simulated():
    with pytest.raises(CompressionError, match=r"^ds_compress.recipe: 'auto' is not simulated.*block"):
        simulate(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), {KEY: AUTO}, cuts=[1])


def test_the_schema_knows_it(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate({KEY: {**AUTO, "quality": "balanced"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({KEY: {**AUTO, "quality": "good"}}, schema)


def test_check_says_what_it_sends_until_then(capsys, tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({KEY: AUTO}))
    assert main(["check", str(file), "--stages", "2", "--shape", "4,1024", "--json"]) == 0
    assert {row["codec"] for row in json.loads(capsys.readouterr().out)} == {"none"}
