"""ds-compress list: print codecs, feedbacks, policies and the keys of the block with all options.

`ds-compress list --markdown` makes docs/options.md.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from ds_compress.cli.arguments import add_import
from ds_compress.cli.check import message_sizes
from ds_compress.cli.console import show, terminal_width
from ds_compress.cli.reference import reference
from ds_compress.codec import TensorSpec
from ds_compress.config import DIRECTIONS, KEY, Config, recipes
from ds_compress.config.recipes import EVIDENCE
from ds_compress.errors import CompressionError

TITLES = {
    "codecs": "Codecs",
    "feedbacks": "Feedbacks",
    "policies": "Policies",
    "block": 'Keys of the "ds_compress" block',
}
Entries = list[dict[str, Any]]

MESSAGE = TensorSpec((4, 1024, 1024), torch.float32)
"""Message whose bits `--recipes` shows."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "list", help="list all codecs, feedbacks, policies and keys of the block, with their options"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--markdown", action="store_true", help="print Markdown: the page docs/options.md")
    parser.add_argument(
        "--recipes", action="store_true", help="list the recipes instead, and what each sends"
    )
    add_import(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.recipes:
        if args.markdown:
            raise CompressionError("--markdown: not allowed with --recipes; allowed: --json")
        _list_recipes(args.json)
        return 0
    found = reference()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(markdown(found) if args.markdown else text(found, min(terminal_width(), 110))))
    return 0


def text(found: dict[str, Entries], width: int) -> Iterator[str]:
    """Format `found` for a terminal, `width` columns wide."""
    for kind, entries in found.items():
        yield from ("", TITLES[kind])
        for entry in entries:
            options = entry.get("options", {})
            yield ""
            if kind == "block":
                yield from _option_text(entry["name"], entry, width, "  ")
            else:
                yield from _wrapped(f"{entry['name']}: {entry['summary']}", width, "  ", "    ")
            for name, option in options.items():
                yield from _option_text(name, option, width, "    ")
            for setting in entry.get("stability", ()):
                of = " ".join(filter(None, ["stability", _words(setting["options"])]))
                yield from _wrapped(f"{of}: {setting['says']}", width, "    ", "        ")


def _option_text(name: str, option: dict[str, Any], width: int, indent: str) -> Iterator[str]:
    head = f"{name} = {_default(option)}   ({option['allowed']})"
    yield from _wrapped(head, width, indent, indent + "    ")
    yield from _wrapped(option["description"], width, indent + "    ", indent + "    ")


def _default(option: dict[str, Any]) -> str:
    return json.dumps(option["default"]) if "default" in option else "(must be given)"


def _words(options: dict[str, Any]) -> str:
    """Format options as they stand between the braces of JSON."""
    return json.dumps(options)[1:-1]


def _wrapped(line: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def markdown(found: dict[str, Entries]) -> Iterator[str]:
    """Format docs/options.md."""
    yield "# Options"
    yield ""
    yield "Made by `ds-compress list --markdown > docs/options.md`; `ds-compress schema` is for editors."
    yield "A codec, feedback or policy is its name, or an object with its name and options:"
    yield '`"codec": {"name": "quantize", "bits": 4}`. An option with a dot is inside an object:'
    yield '`"link": {"mode": "eager"}`.'
    yield ""
    yield "Stability of a codec is what a feedback can count on: the root of the largest share of a message's"
    yield "energy that is lost, or the largest error over the largest magnitude. Below 1, a contraction, the"
    yield "residual of error feedback stays bounded; pairs for which it could grow without bound are refused."
    for kind, entries in found.items():
        yield from ("", f"## {TITLES[kind]}")
        if kind == "block":
            yield ""
            yield from _table({entry["name"]: entry for entry in entries})
            continue
        for entry in entries:
            yield from ("", f"### {entry['name']}", "", entry["summary"])
            if entry["options"]:
                yield ""
                yield from _table(entry["options"])
            if "stability" in entry:
                yield from ("", "Stability:", "")
            for setting in entry.get("stability", ()):
                of = f"`{_words(setting['options'])}`" if setting["options"] else "defaults"
                yield f"- {of}: {setting['says']}"


def _table(options: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| option | default | allowed | what it does |"
    yield "|---|---|---|---|"
    for name, option in options.items():
        cells = (f"`{name}`", f"`{_default(option)}`", option["allowed"], option["description"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _list_recipes(as_json: bool) -> None:
    """Print all recipes, what they send and the block of each."""
    rows = [_recipe_row(name) for name in recipes.names()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = [
        {
            "recipe": row["recipe"],
            **{direction: row[direction] for direction in DIRECTIONS},
            "bits per value": " / ".join(f"{row[f'bits_{direction}']:.2f}" for direction in DIRECTIONS),
            "ratio": f"{row['ratio']:.2f}",
            "cost, off / on": str(EVIDENCE.get(row["recipe"], "no promise")),
        }
        for row in rows
    ]
    show(f'{KEY}: {{"recipe": NAME}}; messages of {MESSAGE}, after a warm-up', table)


def _recipe_row(name: str) -> dict[str, Any]:
    block = recipes.recipe(name, KEY)
    config = Config(block)
    sizes = {row["direction"]: row for row in message_sizes(config, 2, MESSAGE)}
    raw, wire = (sum(row[key] for row in sizes.values()) for key in ("raw_bytes", "wire_bytes"))
    return {
        "recipe": name,
        **{direction: str(getattr(config.in_force.codecs(None), direction)) for direction in DIRECTIONS},
        **{f"bits_{direction}": sizes[direction]["bits_per_value"] for direction in DIRECTIONS},
        "ratio": raw / wire,
        "block": block,
        "evidence": EVIDENCE[name]._asdict() if name in EVIDENCE else None,
    }
