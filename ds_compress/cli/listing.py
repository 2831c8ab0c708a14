"""ds-compress list: codecs and feedbacks with their options."""

import argparse
import json
from typing import Any

from rich.table import Table

from ds_compress import config  # noqa: F401  (registers the codecs)
from ds_compress.cli.console import console
from ds_compress.codec import CODECS
from ds_compress.feedback import FEEDBACKS
from ds_compress.registry import Registry


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("list", help="codecs and feedbacks with their options")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = {f"{registry.kind}s": describe(registry) for registry in (CODECS, FEEDBACKS)}
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for kind, entries in found.items():
        table = Table("name", "what it does", "options (default)", title=kind)
        for entry in entries:
            options = "\n".join(
                f"{name}: {option['allowed']} ({option['default']!r})"
                for name, option in entry["options"].items()
            )
            table.add_row(entry["name"], entry["summary"], options)
        console().print(table)
    return 0


def describe(registry: Registry) -> list[dict[str, Any]]:
    """Name, summary and options (default, allowed values, description) of everything in `registry`."""
    entries = []
    for name in registry.names():
        cls = registry.find(name, registry.kind)
        schema = cls.Options.model_json_schema()
        options = {
            option: {
                "default": field.get_default(call_default_factory=True),
                "allowed": _allowed(schema["properties"][option], schema),
                "description": field.description or "",
            }
            for option, field in cls.Options.model_fields.items()
        }
        entries.append({"name": name, "summary": cls.summary(), "options": options})
    return entries


def _allowed(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        return " | ".join(_allowed(choice, root) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema)
    return " ".join(filter(None, [schema.get("type", "any"), limits]))
