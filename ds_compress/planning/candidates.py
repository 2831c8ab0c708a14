"""List the candidates that `auto` and `advise` choose from: all recipes, and more codecs."""

import json
from dataclasses import dataclass
from typing import Any

from ds_compress.config import DIRECTIONS, KEY, recipes
from ds_compress.config.quality import LIMITS

CODECS: dict[str, Any] = {
    "fp8 e4m3": "fp8",
    **{f"quantize {bits}": {"name": "quantize", "bits": bits} for bits in (8, 6, 4)},
    **{f"entropy {bits}": {"name": "entropy", "bits": bits} for bits in (5, 4)},
    # unbiased, for gradients
    **{
        f"quantize {bits} dither": {"name": "quantize", "bits": bits, "hadamard": True, "rounding": "dither"}
        for bits in (3, 2)
    },
    "entropy 2 dither": {"name": "entropy", "bits": 2, "rounding": "dither"},
}
"""Codecs beside those of the recipes. A test says which have rows, which keep the promises of classes."""


@dataclass(frozen=True)
class Candidate:
    """Settings of both directions of one boundary."""

    name: str
    block: dict[str, Any]  # keys of the "ds_compress" block
    is_separable: bool  # whether one direction may be used without the other


def all_candidates() -> list[Candidate]:
    """Return every candidate; no two share a name or a block."""
    plain = [
        Candidate(name, {direction: {"codec": codec} for direction in DIRECTIONS}, True)
        for name, codec in CODECS.items()
    ]
    # Recipes named after a quality class come last: most are the same as another recipe
    named = map(_of_recipe, sorted(recipes.names(), key=lambda name: name in LIMITS))
    of_messages = [candidate for candidate in named if "replicas" not in candidate.block]
    found: dict[str, Candidate] = {}
    for candidate in [*plain, *of_messages]:
        found.setdefault(json.dumps(candidate.block, sort_keys=True), candidate)
    return [*found.values()]


def startable_candidates() -> list[Candidate]:
    """Return the candidates that can start at any step.

    A candidate whose block has other keys than the directions, such as a warm-up to learn from, cannot.
    """
    return [candidate for candidate in all_candidates() if candidate.block.keys() == set(DIRECTIONS)]


def _of_recipe(name: str) -> Candidate:
    block = recipes.recipe(name, KEY)
    is_symmetric = block.keys() == set(DIRECTIONS) and block["forward"] == block["backward"]
    return Candidate(name, block, is_symmetric and "feedback" not in block["forward"])
