"""ds-compress list: print codecs, feedbacks, policies and the keys of the block with all options.

`ds-compress list --markdown` makes docs/options.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

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


HELP = "list all codecs, feedbacks, policies and keys of the block, with their options"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--markdown", action="store_true", help="print Markdown: the page docs/options.md")
    parser.add_argument(
        "--recipes", action="store_true", help="list the recipes instead, and what each sends"
    )
    add_import(parser)


def run(args: argparse.Namespace) -> int:
    if args.recipes:
        if args.markdown:
            raise CompressionError("--markdown: not allowed with --recipes; allowed: --json")
        _list_recipes(args.json)
        return 0
    found = reference()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    page = "\n".join(markdown(found))
    if args.markdown or not (sys.stdout.encoding or "").lower().startswith("utf"):  # of rich's bullets
        print(page)
    else:
        Console(width=min(terminal_width(), 110)).print(Markdown(page))
    return 0


def markdown(found: dict[str, Entries]) -> Iterator[str]:
    """Format docs/options.md, which is also what a terminal shows."""
    yield "# Options"
    yield ""
    yield "Made by `ds-compress list --markdown > docs/options.md`; `ds-compress schema` is for editors."
    yield "A codec, feedback or policy is its name, or an object with its name and options:"
    yield '`"codec": {"name": "quantize", "bits": 4}`. An option with a dot is inside an object:'
    yield '`"link": {"mode": "eager"}`. After each option come its default, and what is allowed.'
    yield ""
    yield "Stability of a codec is what a feedback can count on: the root of the largest share of a message's"
    yield "energy that is lost, or the largest error over the largest magnitude. Below 1, a contraction, the"
    yield "residual of error feedback stays bounded; pairs for which it could grow without bound are refused."
    for kind, entries in found.items():
        yield from ("", f"## {TITLES[kind]}", "")
        if kind == "block":
            yield from map(_option, entries)
            continue
        for entry in entries:
            yield from (f"### {entry['name']}", "", entry["summary"], "")
            if entry["options"]:
                yield from (_option({"name": name, **option}) for name, option in entry["options"].items())
                yield ""
            if "stability" in entry:
                yield from ("Stability:", "")
                for setting in entry["stability"]:
                    # as they stand between the braces of JSON
                    of = f"`{json.dumps(setting['options'])[1:-1]}`" if setting["options"] else "defaults"
                    yield f"- {of}: {setting['says']}"
                yield ""


def _option(option: dict[str, Any]) -> str:
    default = f"`{json.dumps(option['default'])}`" if "default" in option else "(must be given)"
    return f"- `{option['name']}` = {default} ({option['allowed']}): {option['description']}"


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
