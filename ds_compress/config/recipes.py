"""Recipes: settings with a name, so that a block can be one key.

A recipe is a ds_config.json of `ds_compress/recipes` (`ds_configs` in a source tree), runnable as it is; only
its "ds_compress" block counts here.

Recipe "auto" chooses settings within an error budget.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ds_compress.errors import CompressionError, did_you_mean, shown

FOLDER = Path(__file__).parents[1] / "recipes"
WHOLE = ("codec", "feedback")
"""Keys whose value replaces that of the recipe as a whole: options of one codec mean nothing to another."""
AUTO = "auto"
"""Name of the recipe that chooses settings from measurements of the first steps."""

Quality = Literal["lossless", "safe", "balanced", "aggressive"]


@dataclass(frozen=True)
class ErrorLimits:
    """Largest errors of messages: of activations the token error (`codecs.message_error`), and of gradients
    that of what an optimizer accumulates (`message.gradient_error`)."""

    forward: float
    backward: float

    def allow(self, forward: float, backward: float) -> bool:
        """Return whether errors are small enough."""
        return forward <= self.forward and backward <= self.backward


LIMITS: dict[Quality, ErrorLimits] = {
    "lossless": ErrorLimits(0.0, 0.0),
    "safe": ErrorLimits(0.06, 0.12),
    "balanced": ErrorLimits(0.10, 0.23),
    "aggressive": ErrorLimits(0.16, 0.23),
}
"""Forward, by token errors on SmolLM2; backward, the errors of recipes of release 0.3 on small language
models. That of `balanced` is that of `aggressive`, whose codec of gradients it has. What settings within them
cost is not promised."""

DEFAULT: Quality = "safe"


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def as_schema(field: dict[str, Any]) -> None:
    """Put the names into the JSON schema of a field that is one of them or null."""
    field["anyOf"] = [{"enum": [AUTO, *names()]}, {"type": "null"}]


def recipe(name: object, key: str, quality: object = DEFAULT) -> dict[str, Any]:
    """Return the block that `name` stands for, which a ds_config.json has at `key`; `quality`: of "auto",
    which takes what the recipe of that name does with tied weights.

    Raises:
        CompressionError: there is no such recipe.
    """
    if name == AUTO:
        of_quality = recipe(quality, key) if quality in names() else {}
        tied = {option: value for option, value in of_quality.items() if option == "tied"}
        return {"quality": DEFAULT, "link": {"depth": "auto"}, **tied}
    known = [AUTO, *names()]
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name, known)
        raise CompressionError(
            f"{key}.recipe: {shown(name)} is not a recipe{near}; known: {', '.join(known)}"
        )
    # an error budget may be another name for one of the others
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
    written = {option: value for option, value in block.items() if option != "quality" or value is not None}
    return with_changes(recipe(block["recipe"], key, written.get("quality", DEFAULT)), written)


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
    """What a recipe costs: rows of `make reproduce`, presets real, small, wide and long (docs/evidence.md).

    Costs are percent of the held-out loss of language models, fine-tuned and from scratch, or points of
    accuracy of a CNN; means over seeds, evaluated with uncompressed messages and with compressed ones.
    """

    row: str  # its name in docs/evidence-tables.md
    worst: tuple[float, float]  # largest cost of any model and task
    fine_tuned: tuple[float, float] | None = None  # promise: most that it costs there; None: none is given
    from_scratch: tuple[float, float] | None = None  # the same

    def __str__(self) -> str:
        given = [
            f"{task} at most {most[0]:g} / {most[1]:g} %"
            for task, most in (("fine-tuned", self.fine_tuned), ("from scratch", self.from_scratch))
            if most is not None
        ]
        return ", ".join([*given, f"measured up to {self.worst[0]:.1f} / {self.worst[1]:.1f} %"])


EVIDENCE = {
    "none": Evidence("none", (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    "safe": Evidence("entropy4-rank8/dither3", (0.8, 1.0), (0.5, 1.0), (1.0, 1.0)),
    "balanced": Evidence("entropy4-rank8/dither1.5", (2.4, 2.7), (1.0, 1.5)),
    "aggressive": Evidence("entropy2.5-rank8/dither1.5", (5.3, 7.7)),
    "quant4": Evidence("group4/4-hadamard", (3.0, 3.1)),
    "quant4_8": Evidence("quant4_8", (2.1, 2.2)),
    "topk10": Evidence("topk10_bf16-reuse", (20.4, 30.8)),
}
"""By recipe. `balanced` and `aggressive` cost most from scratch, after 1,200 and 4,800 steps. The promise for
training from scratch holds up to 1,200 steps at width 128 (three seeds)."""
