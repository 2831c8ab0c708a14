"""Describe all codecs, feedbacks, policies and keys of the block with their options, as pydantic knows them.

`ds-compress list` and docs/options.md are made from it; `ds-compress schema` prints it for editors.
"""

import argparse
import json
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_compress.cli.arguments import add_import
from ds_compress.codec import CODECS, TYPICAL
from ds_compress.config import KEY, Block
from ds_compress.config.policies import POLICIES
from ds_compress.feedback import FEEDBACKS
from ds_compress.registry import Registry
from ds_compress.testing import settings_of

_LIMITS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "multiple of",
}


HELP = 'print a JSON Schema with which an editor checks the "ds_compress" block of a ds_config.json'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_import(parser)


def run(args: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def reference() -> dict[str, list[dict[str, Any]]]:
    """Describe codecs, feedbacks and policies with their options by name, and the block's keys, each with
    "name", "default", "allowed" and "description"; codecs with their `stability` too."""
    block = [{"name": name, **option} for name, option in options(Block).items()]
    named: dict[str, Registry[Any]] = {"codecs": CODECS, "feedbacks": FEEDBACKS, "policies": POLICIES}
    found = {kind: describe(registry) for kind, registry in named.items()}
    codecs = [{**entry, "stability": stability(entry["name"])} for entry in found["codecs"]]
    return {**found, "codecs": codecs, "block": block}


def stability(codec: str) -> list[dict[str, Any]]:
    """Describe what a feedback can count on, once for each promise, with the options of `codec` that make it:
    "options", "kind", "says"."""
    found: dict[str, dict[str, Any]] = {}
    for setting in settings_of(codec):
        own = CODECS.build(setting, codec).stability(TYPICAL)
        options = {key: value for key, value in setting.items() if key != "name"}
        found.setdefault(str(own), {"options": options, "kind": own.kind, "says": str(own)})
    return list(found.values())


def describe(registry: Registry[Any]) -> list[dict[str, Any]]:
    """Return name, summary and options of each entry of `registry`."""
    classes = [registry.find(name, registry.kind) for name in registry.names()]
    return [{"name": cls.name, "summary": cls.summary(), "options": options(cls.Options)} for cls in classes]


def options(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Describe default (unless it must be given), allowed values and description of every option; those of an
    object below it, as "link.mode"."""
    schema = model.model_json_schema()
    found: dict[str, dict[str, Any]] = {}
    for name, field in model.model_fields.items():
        own = schema["properties"][name]
        found[name] = {
            **({} if field.is_required() else {"default": _default(field)}),
            "allowed": _allowed(own, schema),
            "description": " ".join((field.description or "").split()),
        }
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel) and "additionalProperties" not in own:
                found |= {f"{name}.{key}": option for key, option in options(inner).items()}
    return found


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _allowed(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "registry" in schema:
        return f"name of a {schema['registry']}, or an object with it"
    if "anyOf" in schema:
        return " | ".join(_allowed(choice, root) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_allowed(schema['items'], root)}"
    limits = ", ".join(f"{sign} {schema[key]:,}" for key, sign in _LIMITS.items() if key in schema)
    return " ".join(filter(None, [schema.get("type", "any"), limits]))


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a ds_config.json, which checks its "ds_compress" block alone.

    A codec is a name, or one of the objects with its name and options.
    """
    definitions: dict[str, Any] = {}
    for registry in (CODECS, FEEDBACKS, POLICIES):
        classes = [registry.find(name, "") for name in registry.names()]
        objects = [_object(cls, _schema_of(cls.Options, definitions)) for cls in classes]
        definitions[registry.kind] = {"oneOf": [{"enum": registry.names()}, *objects]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ds_config.json",
        "type": "object",
        "properties": {KEY: _schema_of(Block, definitions)},
        "$defs": definitions,
    }


def _object(cls: Any, of_options: dict[str, Any]) -> dict[str, Any]:
    return {
        **of_options,
        "description": cls.summary(),
        "properties": {"name": {"const": cls.name}, **of_options.get("properties", {})},
        "required": ["name", *of_options.get("required", [])],
    }


def _schema_of(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of `model`; what it refers to goes to `definitions`."""

    def refer(part: dict[str, Any]) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{part.pop('registry')}", **part} if "registry" in part else part

    found: dict[str, Any] = json.loads(json.dumps(model.model_json_schema()), object_hook=refer)
    definitions.update(found.pop("$defs", {}))
    return found
