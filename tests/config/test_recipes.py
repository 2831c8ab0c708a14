"""Recipes by name, `auto` among them: settings of files, each changed by the key that says otherwise."""

import itertools
import json

import pytest
from torch import nn

from ds_compress.cli import main
from ds_compress.config import DIRECTIONS, KEY, Config, recipes
from ds_compress.config.recipes import DEFAULT, LIMITS
from ds_compress.monitor.lines import announcement
from ds_compress.simulate import simulate
from tests.support.launch_scripts import ROOT
from tests.support.refusals import refusal

NAMES = recipes.names()


def settings(block):
    return Config(block).settings


def test_every_file_is_a_recipe():
    assert [file.stem for file in sorted((ROOT / "ds_configs").glob("*.json"))] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_the_block_of_its_file(name):
    written = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())[KEY]
    named = Config({"recipe": name})
    assert named.settings == settings(written) and "recipe" not in named.settings, "ends compare them"
    assert named.warmup_steps == Config(written).warmup_steps


def test_a_codec_is_replaced_with_all_its_options():
    forward = {"codec": {"name": "quantize", "bits": 8}}
    block = {"recipe": "quant4_8", "forward": forward}
    assert settings(block)["forward"] == settings({"forward": forward})["forward"]
    assert settings(block)["backward"] == settings({"recipe": "quant4_8"})["backward"]


def test_a_codec_alone_leaves_the_feedback():
    recipe = {"backward": {"codec": "bf16", "feedback": "loco"}, "seed": 1}
    changed = recipes.with_changes(recipe, {"backward": {"codec": {"name": "quantize", "bits": 3}}})
    assert changed == {"backward": {"codec": {"name": "quantize", "bits": 3}, "feedback": "loco"}, "seed": 1}
    without = recipes.with_changes(changed, {"backward": {"feedback": "none"}})
    assert without["backward"]["feedback"] == "none"


def test_single_keys_and_boundaries_change_it():
    own = {"1": {"forward": {"codec": "none"}}}
    config = Config({"recipe": "quant4_8", "seed": 5, "link": {"depth": 2}, "boundaries": own})
    assert (config.block.seed, config.block.link.depth, config.block.link.mode) == (5, 2, "eager")
    assert config.in_force.codecs(1).forward.name == "none"
    assert config.in_force.codecs(0).settings == Config({"recipe": "quant4_8"}).in_force.codecs(0).settings


def test_the_list(capsys):
    assert main(["list", "--recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert main(["list", "--recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == NAMES
    assert rows["none"]["ratio"] == pytest.approx(1, abs=1e-4)
    assert rows["quant4_8"]["bits_forward"] == pytest.approx(4.25, abs=0.01)
    assert rows["quant4_8"]["bits_backward"] == pytest.approx(8.25, abs=0.01)
    assert all(settings(row["block"]) == settings({"recipe": name}) for name, row in rows.items())


def test_the_first_line_names_it():
    sizes = {"message_raw_bytes": 100.0, "message_wire_bytes": 50.0}
    channels = {(0, direction): sizes for direction in DIRECTIONS}
    line = announcement(Config({"recipe": "bf16"}), channels, "eager", lambda place: "", {})
    assert "active, recipe bf16, link eager" in line
    assert "active, link eager" in announcement(Config({}), channels, "eager", lambda place: "", {})


def test_classes_of_quality_are_recipes():
    """Messages without feedback, which harms gradients of few bits; without a warm-up, whose fp32 would
    cap the ratio."""
    for name in ("safe", "balanced", "aggressive"):
        block = recipes.recipe(name, KEY)
        assert set(block) == {*DIRECTIONS, "tied"}
        assert all(set(block[direction]) == {"codec"} for direction in DIRECTIONS)
    assert {*LIMITS} <= {*NAMES}


AUTO = {"recipe": "auto"}


@pytest.mark.parametrize("block", [AUTO, {**AUTO, "quality": None}])
def test_auto_alone_is_enough(block):
    """A null, which is the schema's default of "quality", was refused."""
    config = Config(block)
    assert config.quality == DEFAULT and config.block.link.depth == "auto"
    assert config.in_force.codecs(0).settings == Config({}).in_force.codecs(0).settings
    assert Config({}).quality is None


@pytest.mark.parametrize("quality", [None, *LIMITS])
def test_auto_sends_tied_weights_as_the_recipe_of_its_quality(quality):
    """Else full fine-tuning of a tied model gains nothing: its embedding dwarfs all messages."""
    auto = {**AUTO, **({"quality": quality} if quality else {})}
    found = Config(auto).tied_codec
    expected = Config({"recipe": quality or DEFAULT}).tied_codec
    assert str(found) == str(expected) and (found is None) == (quality == "lossless")
    assert Config({**auto, "tied": {"codec": "none"}}).tied_codec is None


def test_classes_are_in_order():
    limits = list(LIMITS.values())
    assert limits[0].forward == limits[0].backward == 0
    for mild, strong in itertools.pairwise(limits):
        assert mild.forward < strong.forward < 1 and mild.backward <= strong.backward < 1


def test_ranks_that_differ_are_found():
    """One machine may have the key, another not: with equal settings they would wait for each other."""
    others = [{}, {"link": {"depth": "auto"}}, {**AUTO, "quality": "aggressive"}]
    assert all(Config(other).settings != Config(AUTO).settings for other in others)


def test_what_auto_adopts_is_the_block_without_the_name():
    config = Config({**AUTO, "seed": 3})
    other = config.changed({"boundaries": {"0": {"forward": {"codec": "bf16"}}}})
    assert other.in_force.codecs(0).forward.name == "bf16" and other.block.seed == 3
    assert config.adopt({"0": {"forward": {"codec": "bf16"}}}) and config.quality == DEFAULT
    assert config.changed({}).in_force.codecs(0).forward.name == "none"


def test_auto_is_not_simulated():
    line = refusal(simulate, nn.Sequential(nn.Identity(), nn.Identity()), {KEY: AUTO}, [1])
    assert line.startswith("ds_compress.recipe: 'auto' is not simulated") and "block" in line
