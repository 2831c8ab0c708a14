"""What holds for every option of every model: of the block, of every codec, of every feedback."""

import pytest
from pydantic import BaseModel

from ds_compress.codec import CODECS
from ds_compress.config import Block
from ds_compress.config.policies import POLICIES
from ds_compress.feedback import FEEDBACKS

MODELS = {"block": Block} | {
    f"{registry.kind} {name}": registry.find(name, "").Options
    for registry in (CODECS, FEEDBACKS, POLICIES)
    for name in registry.names()
}


def numbers(schema, where=""):
    """(where, schema) of every number in a JSON schema."""
    if schema.get("type") in ("integer", "number"):
        yield where, schema
    for key, inner in schema.items():
        for number, part in enumerate(inner) if isinstance(inner, list) else [(key, inner)]:
            if isinstance(part, dict):
                yield from numbers(part, f"{where}/{key}/{number}" if number != key else f"{where}/{key}")


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_bounded(name):
    """A time-out of 1e300 seconds and a group of 2^50 values once ended in tracebacks."""
    for where, number in numbers(MODELS[name].model_json_schema()):
        assert {"minimum", "exclusiveMinimum"} & set(number), f"{where} has no lower bound"
        assert {"maximum", "exclusiveMaximum"} & set(number), f"{where} has no upper bound"


def every_option(model, path=""):
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from every_option(inner, f"{path}{name}.")


@pytest.mark.parametrize("name", MODELS)
def test_every_option_is_described(name):
    """18 of 52 were not; `ds-compress list` and docs/options.md say of an option what stands below it."""
    for option, field in every_option(MODELS[name]):
        assert field.description, f"{option} has no docstring"
        assert field.description.strip().endswith("."), option


@pytest.mark.parametrize("registry", [CODECS, FEEDBACKS, POLICIES], ids=lambda registry: registry.kind)
def test_everything_that_has_a_name_is_summed_up(registry):
    for name in registry.names():
        assert registry.find(name, "").summary().endswith("."), name
