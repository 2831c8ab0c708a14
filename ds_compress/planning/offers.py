"""What there is to choose from: the recipes by name, and more codecs; most may be mixed."""

import json
from dataclasses import dataclass
from typing import Any

from ds_compress.codecs.mixins import BothDirections
from ds_compress.config import DIRECTIONS, KEY, Config, recipes
from ds_compress.config.quality import LIMITS

CODECS: dict[str, Any] = {
    "fp8 e4m3": "fp8",
    **{f"quantize {bits}": {"name": "quantize", "bits": bits} for bits in (8, 6, 4, 2)},
    **{f"quantize {bits} hadamard": {"name": "quantize", "bits": bits, "hadamard": True} for bits in (6, 2)},
    "quantize 4 gaussian": {"name": "quantize", "bits": 4, "hadamard": True, "grid": "gaussian"},
    **{f"entropy {bits:g}": {"name": "entropy", "bits": bits} for bits in (5, 4, 3, 2.5, 2, 1.5, 1)},
    "topk 0.3": {"name": "topk", "density": 0.3},
}
"""Beside those of the recipes. Rotated groups of 2 and 3 bits have the Gaussian grid."""


@dataclass(frozen=True)
class Offer:
    """A setting of both directions."""

    name: str
    block: dict[str, Any]  # the keys of the "ds_compress" block that say it
    splits: bool  # whether one direction may be had without the other


def offered() -> list[Offer]:
    """All of them; no two have a name or a block in common."""
    plain = [
        Offer(name, {direction: {"codec": codec} for direction in DIRECTIONS}, True)
        for name, codec in CODECS.items()
    ]
    # recipes named after a class of quality come last: most have another name too
    named = map(_named, sorted(recipes.names(), key=lambda name: name in LIMITS))
    found: dict[str, Offer] = {}
    for offer in [*plain, *named]:
        found.setdefault(json.dumps(offer.block, sort_keys=True), offer)
    return [*found.values()]


def startable() -> list[Offer]:
    """Those that can begin at any step: what needs other keys than those of the directions, such as a
    warm-up to learn from, cannot."""
    return [offer for offer in offered() if offer.block.keys() == set(DIRECTIONS)]


def _named(name: str) -> Offer:
    block = recipes.recipe(name, KEY)
    codecs = Config(block).codecs(None)
    alike = block.keys() == set(DIRECTIONS) and block["forward"] == block["backward"]
    bound = isinstance(codecs.forward, BothDirections) or "feedback" in block["forward"]
    return Offer(name, block, alike and not bound)
