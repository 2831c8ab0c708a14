"""Check options of the block that depend on each other."""

from collections.abc import Iterator
from typing import Any

from ds_compress.codec import TYPICAL, Codec
from ds_compress.codecs.mixins import layers
from ds_compress.config.block import DIRECTIONS, KEY, Block
from ds_compress.config.quality import LIMITS
from ds_compress.config.recipes import AUTO
from ds_compress.errors import CompressionError, shown, shown_key

COARSE = 0.1
"""Relative error on normal values from which a feedback of gradients is warned about: 4 bits have it."""

MAX_NESTING = 16
"""Objects and lists within each other; no block needs half as many."""


def check_nesting(block: object) -> None:
    """Refuse a block that is nested so deep that checking it would exceed Python's recursion limit.

    Raises:
        CompressionError: names the first key.
    """
    level: list[tuple[Any, str]] = [(block, "")]
    for _ in range(MAX_NESTING):
        level = [
            (inner, path or f".{shown_key(key)}")
            for value, path in level
            for key, inner in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(inner, (dict, list))
        ]
    if level:
        raise CompressionError(
            f"{KEY}{level[0][1]}: objects and lists are nested too deep; allowed: {MAX_NESTING} within each "
            "other"
        )


def check(block: Block) -> None:
    """
    Raises:
        CompressionError: options contradict each other; one line with the JSON path.
    """
    if block.warmup_steps and block.warmup_epochs:
        raise CompressionError(
            f"{KEY}.warmup_epochs: {block.warmup_epochs} came together with warmup_steps; use one of them"
        )
    _check_auto(block)
    if block.guard.action != "warn" and block.guard.every == 0:
        raise CompressionError(
            f"{KEY}.guard.action: {block.guard.action!r} is not allowed with guard.every 0, which never "
            "checks anything; use 1 up, or leave action out"
        )
    link = block.link
    if link.memory_gb is not None and link.depth != "auto":
        raise CompressionError(
            f"{KEY}.link.memory_gb: {link.memory_gb:g} limits depth 'auto', but depth is {link.depth}; use "
            "depth 'auto', or leave memory_gb out"
        )
    if link.depth != 1 and link.mode == "blocking":
        raise CompressionError(
            f"{KEY}.link.depth: {link.depth!r} is not allowed with mode 'blocking': a stage would send a "
            "gradient before its neighbour asks for it, and both would wait for ever; use mode 'eager'"
        )


def feedback_notes(config: Any) -> Iterator[str]:
    """Yield one line for each feedback beside a coarse, biased codec of gradients.

    Its residuals come from other samples, so the bias of the codec reaches the optimizer all the same
    (docs/codecs.md has the losses).

    Args:
        config: a `Config`.
    """
    for number in config.numbers:
        codecs, path = config.codecs(number), config.chosen(number, "backward")["feedback"][1]
        feedback, (*_, codec) = codecs.feedbacks["backward"], layers(codecs.backward, Codec)
        if feedback.name != "none" and not codec.unbiased and codec.gaussian_error_bound(TYPICAL) >= COARSE:
            yield (
                f"{path}: {feedback.name!r} keeps residuals of other samples, and {codec} is biased: Adam "
                'amplifies that, and training from scratch may collapse; use "feedback": "none" and a codec '
                'that is unbiased ("rounding": "dither" or "stochastic"), or 6 bits'
            )


def check_policy(name: str, block: Block) -> None:
    """
    Raises:
        CompressionError: something else would change the settings that the policy `name` changes.
    """
    if name == "constant":
        return
    if block.guard.action == "relax":
        raise CompressionError(
            f"{KEY}.guard.action: 'relax' is not allowed: policy {name!r} would take back what it does; use "
            "'warn'"
        )
    if block.recipe == AUTO:
        raise CompressionError(
            f"{KEY}.policy: {name!r} is not allowed with recipe 'auto', which chooses the settings; use "
            "'constant'"
        )


def _check_auto(block: Block) -> None:
    """Refuse what contradicts settings that choose themselves, or an option that means nothing without."""
    auto = block.recipe == AUTO
    if auto != (block.quality is not None):
        which = "recipe 'auto'" if auto else "no recipe 'auto'"
        raise CompressionError(
            f"{KEY}.quality: {shown(block.quality)} is not allowed with {which}; "
            f"allowed: a class with recipe 'auto' alone: {', '.join(LIMITS)}"
        )
    for key in (*DIRECTIONS, "boundaries"):
        if auto and key in block.model_fields_set:
            raise CompressionError(
                f"{KEY}.{key}: is not allowed with recipe 'auto', which chooses it; leave it out"
            )
    if auto and block.link.mode == "blocking":
        raise CompressionError(f"{KEY}.link.mode: 'blocking' is not allowed with recipe 'auto'; use 'eager'")
