"""What holds for every option: thousands of bad blocks are refused with their place, all are described."""

import contextlib
import copy
import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ds_compress.cli.check import message_sizes
from ds_compress.codec import CODECS, TensorSpec
from ds_compress.config import KEY, Block, Config
from ds_compress.config.block import BoundaryOptions
from ds_compress.config.policies import POLICIES
from ds_compress.errors import CompressionError, shown_key
from ds_compress.feedback import FEEDBACKS

LONGEST_LINE = 600  # of which the names that are allowed take most
MESSAGE = TensorSpec((4, 16, 256), torch.float32)

VALUES = [
    *(None, True, False, [], {}, [1], {"name": 1}, {"no_such_option": 1}, [[]], [{}]),
    *(0, 1, -1, 7, 12, 2**31, 2**50, 2**64, 10**30, -(10**30), 10**5000),
    *(0.0, 1.0, 0.5, -0.5, 1e-300, 1e-9, 1e300, -1e300, math.inf, -math.inf, math.nan),
    *("", " ", "none", "1", "true", "no_such_name", "\n", "\ud800", "٣", "x" * 10_000, "fp32 "),
    *(b"bytes", {1, 2}, (1, 2), object(), {1: 2}, {None: 1}, {"a\nb": 1}, {"k" * 10_000: 1}, 1j, float),
]


def nested(model: type[BaseModel]):
    """(keys from `model` to a model inside of it, that model), itself included."""
    yield (), model
    for name, field in model.model_fields.items():
        for choice in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if name != "boundaries" and isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from (((name, *keys), inner) for keys, inner in nested(choice))


def models():
    """(JSON path of an object, its model, a good block that has it, the keys to it)."""
    found = [({}, keys, model) for keys, model in nested(Block)]
    found += [({}, ("boundaries", "1", *keys), model) for keys, model in nested(BoundaryOptions)]
    directions = [("forward",), ("backward",)]
    for place in (*directions, *(("boundaries", "1", *direction) for direction in directions)):
        for registry in (CODECS, FEEDBACKS):
            for name in registry.names():
                block = put({}, (*place, registry.kind), {"name": name})
                for keys, model in nested(registry.find(name, "").Options):
                    found.append((block, (*place, registry.kind, *keys), model))
    return [(".".join([KEY, *keys]), model, block, keys) for block, keys, model in found]


def put(block: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of `block` with `value` at `keys`."""
    block = copy.deepcopy(block)
    inner = block
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    return block


def refusal(block: object) -> str:
    """The line that refuses `block`; empty when it is accepted."""
    try:
        Config(block)
    except CompressionError as error:
        line = str(error)
        assert line.startswith(KEY) and line.isprintable(), line
        assert len(line) <= LONGEST_LINE, line
        line.encode()
        return line
    return ""


def found_again(block: dict[str, Any], keys: tuple[str, ...], value: Any) -> bool:
    """Whether what was accepted at `keys` is what the block means; its settings are JSON, its messages have
    a size."""
    config = Config(block)
    json.dumps(config.settings)
    with contextlib.suppress(CompressionError):  # of a message without such a position
        message_sizes(config, 4, MESSAGE)
    inner: Any = config.block
    for registry in (CODECS, FEEDBACKS):
        if registry.kind in keys[:-1]:  # down to its options, which the codecs are built from
            at = keys.index(registry.kind)
            codecs = config.in_force.codecs(int(keys[1]) if keys[0] == "boundaries" else None)
            codec = getattr(codecs, keys[at - 1])
            has_it = codec.feedback if registry.kind == "feedback" else getattr(codec, "codec", codec)
            inner = has_it.options
            keys = keys[at + 1 :]
    for key in keys:
        if isinstance(inner, BaseModel):
            assert key in inner.model_fields_set, keys
            inner = getattr(inner, key)
        else:
            inner = inner[key]
    return inner == value or (isinstance(inner, BaseModel) and inner == type(inner).model_validate(value))


def test_every_option_with_every_kind_of_value():
    refused = 0
    for path, model, block, keys in models():
        for name in model.model_fields:
            for value in VALUES:
                bad = put(block, (*keys, name), value)
                line = refusal(bad)
                refused += bool(line)
                if line:
                    # some values are right by themselves, and wrong with another part of the block
                    parts = {"forward", "backward", "boundaries", "replicas", "warmup_steps", "warmup_epochs"}
                    alone = not parts.intersection([*keys, name])
                    assert line.startswith(f"{path}.{name}") if alone else re.split("[.:]", line)[1] in parts
                else:
                    assert found_again(bad, (*keys, name), value), bad
    assert refused >= 1000


def misspelt(name):
    spaced = name.replace("_", "-") + "-"
    return {name + "s", name[:-1], name.upper(), name + " ", spaced, "_" + name}


def test_every_key_that_is_not_known_there():
    """Misspelt, or right elsewhere: an option of the codec beside the codec, a block in a block, ..."""
    keys_known = {name for _, model, *_ in models() for name in model.model_fields} | {KEY, "name"}
    for path, model, block, keys in models():
        named = {"name"} if keys[-1:] in (("codec",), ("feedback",)) else set()
        for name in keys_known.union(*map(misspelt, model.model_fields)) - set(model.model_fields) - named:
            line = refusal(put(block, (*keys, name), 1))
            assert line.startswith(f"{path}.{shown_key(name)}: unknown key"), (path, name, line)


ANY_KEY = st.text() | st.sampled_from(["name", "codec", "feedback", *Block.model_fields])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_KEY, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([keys for *_, keys in models()]), ANY_JSON)
@pytest.mark.extended
def test_any_json_at_any_place(keys, value):
    """The block itself is the first place."""
    line = refusal(put({}, keys, value) if keys else value)
    assert line or keys or set(value) <= Block.model_fields.keys()


NOT_NUMBERS = ["00", "01", "+1", "-1", "1.0", " 1", "1 ", "1_0", "٣", "²", "0x1", "", "9" * 40, 0, None]


@pytest.mark.parametrize("number", NOT_NUMBERS)
def test_boundaries_are_canonical_numbers(number):
    """`"01"` once passed every check and was then never found."""
    line = refusal({"boundaries": {number: {"forward": {"codec": "bf16"}}}})
    assert line.startswith(f"{KEY}.boundaries") and "is not the number of a boundary" in line


@pytest.mark.parametrize("depth", [17, 300, 100_000])
def test_blocks_nested_too_deep(depth):
    """300 was once a RecursionError."""
    value: Any = "none"
    for _ in range(depth):
        value = {"name": "topk", "values": value}
    line = refusal({"forward": {"codec": value}})
    assert line.startswith(f"{KEY}.forward: objects and lists are nested too deep; allowed: 16")


MODELS = {"block": Block, "boundary": BoundaryOptions} | {
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


@pytest.mark.parametrize("name", MODELS)
def test_every_option_is_described(name):
    """18 of 52 were not; `ds-compress list` and docs/options.md say of an option what stands below it."""
    for keys, model in nested(MODELS[name]):
        for option, field in model.model_fields.items():
            assert (field.description or "").strip().endswith("."), f"{(*keys, option)} has no docstring"


@pytest.mark.parametrize("registry", [CODECS, FEEDBACKS, POLICIES], ids=lambda registry: registry.kind)
def test_everything_that_has_a_name_is_summed_up(registry):
    for name in registry.names():
        assert registry.find(name, "").summary().endswith("."), name
