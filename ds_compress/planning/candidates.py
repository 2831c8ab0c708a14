"""List the candidates that `auto` and `advise` choose from."""

from dataclasses import dataclass
from typing import Any

from ds_compress.config import DIRECTIONS, KEY, recipes

CODECS: dict[str, Any] = {
    **{f"quantize {bits}": {"name": "quantize", "bits": bits} for bits in (8, 6)},
    # unbiased, for gradients
    "quantize 3 dither": {"name": "quantize", "bits": 3, "hadamard": True, "rounding": "dither"},
    "entropy 2 dither": {"name": "entropy", "bits": 2, "rounding": "dither"},
}
RECIPES = ("bf16", "none", "quant4", "lossless", "aggressive", "balanced", "safe")
"""A test holds all candidates to the promises of error budgets, by their rows in `results`."""


@dataclass(frozen=True)
class Candidate:
    """Settings of both directions of one boundary."""

    name: str
    block: dict[str, Any]  # keys of the "ds_compress" block
    is_separable: bool  # whether one direction may be used without the other


def all_candidates() -> list[Candidate]:
    """Return every candidate; no two share a name or a block, and each can start at any step."""
    plain = {name: {each: {"codec": codec} for each in DIRECTIONS} for name, codec in CODECS.items()}
    blocks = plain | {name: recipes.recipe(name, KEY) for name in RECIPES}
    return [Candidate(name, block, block["forward"] == block["backward"]) for name, block in blocks.items()]
