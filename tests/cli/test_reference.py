"""What `list`, `schema` and docs/options.md say is what is checked."""

import json

import jsonschema
import pytest

from ds_compress.cli import main
from ds_compress.cli.listing import markdown
from ds_compress.cli.reference import reference, schema
from ds_compress.codec import CODECS
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS
from tests.config.test_generated_blocks import VALUES, models, put

CHECKED_TOGETHER = {"delay", "hadamard", "values", "offload", "memory_gb"}
"""Options whose right values depend on others, which a JSON Schema does not say."""


@pytest.fixture(scope="module")
def validator():
    """Of the block alone."""
    found = schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator({**found["properties"]["ds_compress"], "$defs": found["$defs"]})


def test_docs_are_up_to_date(pytestconfig):
    """`make docs` writes them."""
    written = (pytestconfig.rootpath / "docs" / "options.md").read_text()
    assert written == "\n".join(markdown(reference())) + "\n"


def test_the_stability_of_a_codec_is_listed(capsys):
    """A pair of codec and feedback was refused, and nothing told beforehand which codecs can be followed."""
    assert main(["list", "--json"]) == 0
    codecs = {entry["name"]: entry["stability"] for entry in json.loads(capsys.readouterr().out)["codecs"]}
    assert codecs.keys() == set(CODECS.names())
    assert {kind["kind"] for kind in codecs["topk"]} == {"contraction"}
    assert {kind["kind"] for kind in codecs["entropy"]} == {"neither", "unbiased"}
    assert len({kind["says"] for kind in codecs["quantize"]}) == len(codecs["quantize"]) > 3
    assert main(["list"]) == 0
    assert '"bits": 8: contraction: loses at most 0.004 of the largest' in capsys.readouterr().out


def test_an_editor_applies_the_schema_to_a_whole_ds_config(pytestconfig, capsys):
    """It was once that of the block, so an editor marked the key "ds_compress" itself as unknown."""
    assert main(["schema"]) == 0
    validator = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    recipes = list((pytestconfig.rootpath / "ds_configs").glob("*.json"))
    assert recipes
    for recipe in recipes:
        validator.validate(json.loads(recipe.read_text()))
    (error,) = validator.iter_errors({"train_batch_size": 8, "ds_compress": {"forward": {"codec": "top_k"}}})
    assert list(error.path) == ["ds_compress", "forward", "codec"]


def test_defaults_fit_the_schema(validator):
    for registry, direction in ((CODECS, "codec"), (FEEDBACKS, "feedback")):
        for name in registry.names():
            for choice in (name, {"name": name}):
                validator.validate({"forward": {direction: choice}})
    listed = {entry["name"]: entry["default"] for entry in reference()["block"]}
    validator.validate({key: value for key, value in listed.items() if "." not in key})


def is_json(value):
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def is_refused(block):
    try:
        Config(block)
    except CompressionError:
        return True
    return False


@pytest.mark.extended
def test_the_schema_refuses_what_the_block_refuses(validator):
    """Value by value, for each option alone."""
    count = 0
    for path, model, block, keys in models():
        if is_refused(block):  # not for this direction, or not without the other one
            continue
        for name in set(model.model_fields) - CHECKED_TOGETHER:
            for value in filter(is_json, VALUES):
                changed = put(block, (*keys, name), value)
                # JSON has one kind of number: 1.0 is an integer there, and is refused here
                if not (isinstance(value, float) and value.is_integer()):
                    assert validator.is_valid(changed) != is_refused(changed), (path, name, value)
                    count += 1
    assert count >= 1000


def test_an_editor_sees_what_is_misspelt(validator):
    misspelt = [{"foward": {}}, {"boundaries": {"01": {}}}, {"forward": {"codec": "top_k"}}]
    misspelt += [{"forward": {"codec": {"name": "topk", "densty": 0.1}}}]
    assert not any(map(validator.is_valid, misspelt)) and validator.is_valid({"boundaries": {"10": {}}})
