"""Relax settings: twice the bits, the density or the rank; if that is not possible, no compression."""

from collections.abc import Iterable
from typing import Any

from ds_compress.codec import TYPICAL, Codec
from ds_compress.codecs.mixins import BothDirections, Learns, ObservesWarmup, layers
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.policies import Place
from ds_compress.config.recipes import with_changes
from ds_compress.errors import CompressionError

MOST = {"bits": 8, "density": 0.5, "rank": 2**16}
"""Options that set the strength of a codec, with their mildest values."""

NONE = {"codec": "none", "feedback": "none"}


def is_lossy(codec: Codec) -> bool:
    """Return whether `codec` may change values."""
    return codec.error_bound(TYPICAL) > 0


def relax(config: Config, places: Iterable[Place]) -> dict[str, Any]:
    """Return milder settings, as "boundaries" of a block, for those of `places` whose codec is lossy."""
    found: dict[str, Any] = {}
    for number, direction in places:
        if is_lossy(getattr(config.codecs(number), direction)):
            milder = _milder(config, with_changes(config.adopted, found), number, direction)
            found = with_changes(found, {str(number): milder})
    return found


def _milder(config: Config, adopted: dict[str, Any], number: int, direction: str) -> dict[str, Any]:
    """Return the first milder settings of the boundary that are valid."""
    choice = config.chosen(number, direction)["codec"][0]
    codec = {"name": choice} if isinstance(choice, str) else choice
    present = getattr(config.codecs(number), direction)
    # learned state, and state shared with the other direction, fits only its own options
    fixed = any(any(layers(present, kind)) for kind in (BothDirections, Learns, ObservesWarmup))
    tries: list[dict[str, Any]] = [
        {direction: {"codec": {**codec, name: value}}}
        for name, most in MOST.items()
        for value in _values(getattr(present.options, name, most), most)
        if not fixed
    ]
    for changes in [*tries, {direction: NONE}]:
        try:
            config.changed({"boundaries": with_changes(adopted, {str(number): changes})})
        except CompressionError:
            continue
        return changes
    return dict.fromkeys(DIRECTIONS, NONE)  # the codec of the other direction needs this one


def _values(present: float, most: float) -> list[float]:
    """Return milder values, the nearest first."""
    return [value for value in dict.fromkeys((2 * present, most)) if present < value <= most]
