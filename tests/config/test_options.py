"""What holds for every option of every model: of the block, of every codec, of every feedback."""

import pytest

from ds_compress.codec import CODECS
from ds_compress.config import Block
from ds_compress.feedback import FEEDBACKS

MODELS = {"block": Block} | {
    f"{registry.kind} {name}": registry.find(name, "").Options
    for registry in (CODECS, FEEDBACKS)
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
