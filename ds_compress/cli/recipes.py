"""ds-compress list --recipes: what each recipe sends."""

import json
from typing import Any

import torch

from ds_compress.cli.check import message_sizes
from ds_compress.cli.console import show
from ds_compress.codec import TensorSpec
from ds_compress.config import DIRECTIONS, KEY, Config, recipes
from ds_compress.config.evidence import EVIDENCE

MESSAGE = TensorSpec((4, 1024, 1024), torch.float32)
"""What the bits are those of."""


def list_recipes(as_json: bool) -> None:
    """Print all recipes, with what they send and the block that each stands for."""
    rows = [_row(name) for name in recipes.names()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = [
        {
            "recipe": row["recipe"],
            **{direction: row[direction] for direction in DIRECTIONS},
            "bits per value": " / ".join(f"{row[f'bits_{direction}']:.2f}" for direction in DIRECTIONS),
            "ratio": f"{row['ratio']:.2f}",
            "cost, on / off": str(EVIDENCE.get(row["recipe"], "not measured over three seeds")),
        }
        for row in rows
    ]
    show(f'{KEY}: {{"recipe": NAME}}; messages of {MESSAGE}, after a warm-up', table)


def _row(name: str) -> dict[str, Any]:
    block = recipes.recipe(name, KEY)
    config = Config(block)
    sizes = {row["direction"]: row for row in message_sizes(config, 2, MESSAGE)}
    raw, wire = (sum(row[key] for row in sizes.values()) for key in ("raw_bytes", "wire_bytes"))
    return {
        "recipe": name,
        **{direction: str(getattr(config.codecs(None), direction)) for direction in DIRECTIONS},
        **{f"bits_{direction}": sizes[direction]["bits_per_value"] for direction in DIRECTIONS},
        "ratio": raw / wire,
        "block": block,
        "evidence": EVIDENCE[name]._asdict() if name in EVIDENCE else None,
    }
