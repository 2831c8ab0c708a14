"""Ladders: the codec of each rung at each boundary, checked before training."""

import itertools
from collections.abc import Callable
from typing import Any

from ds_compress.codec import CODECS, TYPICAL, Codec, bytes_of
from ds_compress.config.block import DIRECTIONS, KEY
from ds_compress.config.codec_settings import CodecSettings
from ds_compress.config.policies.base import LadderOptions, Policy, format_rung
from ds_compress.errors import CompressionError, did_you_mean

Ladder = tuple[dict[str, Any], ...]
"""The codec of each rung, as a JSON object."""


def ladders(settings: CodecSettings, policy: Policy, boundary: int | None) -> dict[str, Ladder]:
    """Return the ladder of each direction of a boundary.

    A direction whose codec lacks the options of the ladder, or for which the policy has none, is left out.

    Args:
        boundary: its number; None: the settings of boundaries without their own.
    """
    options = policy.options
    found = {}
    for direction in DIRECTIONS if isinstance(options, LadderOptions) else ():
        rungs, chosen = options.rungs(direction), settings.codec_choice(boundary, direction)
        known = CODECS.find(chosen["name"], "").Options.model_fields
        if rungs and rungs[0].keys() <= known.keys():
            found[direction] = tuple({**chosen, **rung} for rung in rungs)
    return found


def check(settings: CodecSettings, policy: Policy, changed: Callable[[dict[str, Any]], Any]) -> None:
    """Check every rung of every boundary.

    Args:
        changed: refuses changes of the block that are not allowed.

    Raises:
        CompressionError: no codec has the options, a value is not allowed, or a codec does not support
            changes during training.
    """
    options, path = policy.options, f"{KEY}.policy"
    if not isinstance(options, LadderOptions):
        return
    every = {number: ladders(settings, policy, number) for number in settings.configured_boundaries}
    if not options.forward and not options.backward:
        raise CompressionError(
            f"{path}.forward: missing, and so is backward; give one of them the values of an option of its "
            'codec, mild to strong: {"bits": [8, 4]}'
        )
    for direction in DIRECTIONS:
        rungs = options.rungs(direction)
        if rungs and not any(direction in found for found in every.values()):
            name = settings.codec_choice(None, direction)["name"]
            _refuse_unknown(name, rungs[0], f"{path}.{direction}", f"{KEY}.{direction}")
        for ladder in (found[direction] for found in every.values() if direction in found):
            codecs = [CODECS.build(codec, f"{path}.{direction}") for codec in ladder]
            _check_order(codecs, rungs, f"{path}.{direction}")
    # rungs that conflict with the codec of the other direction, or with the feedback
    for pair in itertools.product(*(options.rungs(direction) or [{}] for direction in DIRECTIONS)):
        together = dict(zip(DIRECTIONS, pair))
        overrides = {
            number: {d: {"codec": {**settings.codec_choice(number, d), **together[d]}} for d in found}
            for number, found in every.items()
        }
        general = overrides.pop(None)
        try:
            changed({**general, "boundaries": {str(number): own for number, own in overrides.items()}})
        except CompressionError as error:
            words = "; ".join(f"{d} {format_rung(rung)}" for d, rung in together.items() if rung)
            raise CompressionError(f"{path}: at {words}: {error}") from None


def _refuse_unknown(name: str, rung: dict[str, Any], path: str, place: str) -> None:
    """Raise a CompressionError for the first option of `rung` that codec `name` of `place` lacks."""
    known = sorted(CODECS.find(name, f"{place}.codec").Options.model_fields)
    for option in rung:
        if option not in known:
            raise CompressionError(
                f"{path}.{option}: codec {name!r} of {place} has no such option"
                f"{did_you_mean(option, known)}; allowed: {', '.join(known) or 'none, so no ladder'}"
            )


def _check_order(codecs: list[Codec], rungs: list[dict[str, Any]], path: str) -> None:
    """Refuse a rung that sends more bytes than the one before it."""
    sizes = [bytes_of(codec.layout(TYPICAL)) for codec in codecs]
    for place, (milder, stronger) in enumerate(itertools.pairwise(sizes)):
        if stronger > milder:
            raise CompressionError(
                f"{path}: {format_rung(rungs[place + 1])} came after {format_rung(rungs[place])} and sends "
                "more bytes; allowed: mild to strong, each value with no more bytes than the one before"
            )
