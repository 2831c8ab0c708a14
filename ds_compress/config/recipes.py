"""Recipes: settings with a name, so that a block can be one key.

A recipe is a ds_config.json of `ds_compress/recipes` (`ds_configs` in a source tree), runnable as it is; only
its "ds_compress" block counts here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.config.quality import DEFAULT
from ds_compress.errors import CompressionError, did_you_mean, shown

FOLDER = Path(__file__).parents[1] / "recipes"
WHOLE = ("codec", "feedback")
"""Keys whose value replaces that of the recipe as a whole: options of one codec mean nothing to another."""
WARMUPS = ("warmup_steps", "warmup_epochs")
AUTO = "auto"
"""Name of the recipe that chooses settings from measurements of the first steps."""


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def as_schema(field: dict[str, Any]) -> None:
    """Put the names into the JSON schema of a field that is one of them or null."""
    field["anyOf"] = [{"enum": [AUTO, *names()]}, {"type": "null"}]


def recipe(name: object, key: str) -> dict[str, Any]:
    """Return the block that `name` stands for, which a ds_config.json has at `key`.

    Raises:
        CompressionError: there is no such recipe.
    """
    if name == AUTO:
        return {"quality": DEFAULT, "link": {"depth": "auto"}}
    known = [AUTO, *names()]
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name, known)
        raise CompressionError(
            f"{key}.recipe: {shown(name)} is not a recipe{near}; known: {', '.join(known)}"
        )
    # a class of quality may be another name for one of the others
    block = with_recipe(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))[key], key)
    return {option: value for option, value in block.items() if option != "recipe"}


def with_recipe(block: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Fill in the settings of the recipe that `block`, the value of `key`, names.

    What `block` sets itself overrides the recipe.

    Raises:
        CompressionError: it names a recipe that does not exist.
    """
    if block.get("recipe") is None:
        return dict(block)
    settings = recipe(block["recipe"], key)
    if any(warmup in block for warmup in WARMUPS):  # one of them, however long, replaces the other
        settings = {name: value for name, value in settings.items() if name not in WARMUPS}
    return with_changes(settings, block)


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with every key of `changes`; in objects inside key by key, but codecs and feedbacks
    as a whole."""
    changed = dict(settings)
    for key, value in changes.items():
        before = changed.get(key)
        if isinstance(before, dict) and isinstance(value, dict) and key not in WHOLE:
            value = with_changes(before, value)
        changed[key] = value
    return changed


class Evidence(NamedTuple):
    """What a recipe costs, as means over seeds: a row of `make reproduce PRESET=cpu` (docs/evidence.md).

    A small ResNet on CIFAR-10 (accuracy in %), and a small GPT fine-tuned on WikiText-2 (perplexity), each
    evaluated with compression and without.
    """

    row: str  # its name in docs/evidence-tables.md
    seeds: int  # the fewer of the two tasks
    accuracy: tuple[float, float]
    perplexity: tuple[float, float]

    def __str__(self) -> str:
        on, off = self.accuracy
        with_it, without = self.perplexity
        return f"ResNet {on:.1f} / {off:.1f} %, GPT {with_it:.3f} / {without:.3f} ({self.seeds} seeds)"


EVIDENCE = {
    "none": Evidence("none", 5, (53.7, 53.7), (5.445, 5.445)),
    **dict.fromkeys(("safe", "quant4"), Evidence("group4/4-hadamard", 3, (53.2, 53.2), (5.496, 5.432))),
    **dict.fromkeys(("balanced", "quant3"), Evidence("group3/3-hadamard", 3, (52.8, 53.0), (5.661, 5.451))),
    "aggressive": Evidence("entropy2.5/2.5", 3, (53.3, 53.4), (5.956, 5.605)),
}
"""By recipe; those with rows of at least three seeds."""
