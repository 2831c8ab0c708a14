"""Compare measurements of a channel with the limits of the guard."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ds_compress.config.block import GuardOptions
from ds_compress.errors import shown_boundaries

LOST = "use more bits or a higher density, or another codec"
GROWS = "error feedback cannot keep up; use a milder codec, or a decay of the feedback"
DRIFTS = 'use "rounding": "stochastic" or "dither" without a feedback, or more bits'
BREAKS = "look for what overflows before this boundary: compression neither makes nor mends it"


class Violation(NamedTuple):
    """A limit that a channel exceeds."""

    limit: str  # option of the guard, or lost_rows, of which it allows none
    words: str  # what was found, and the limit
    advice: str


LASTING = ("residual_share", "nonfinite_share")
"""Measurements that count only if they persist: fp16 training skips a step that overflows, and one small
gradient makes any residual large."""


class MessageQuality(NamedTuple):
    """Measurements that the guard has limits for; larger is worse."""

    error: float  # token error of activations
    gradient_error: float  # of gradients
    residual: float
    nonfinite: float
    lost_rows: float  # of activations

    @classmethod
    def of(cls, values: Mapping[str, float], before: Mapping[str, float], direction: str) -> "MessageQuality":
        """Take the measurements of one channel.

        Args:
            values: of a channel, by name as in `metrics.CHANNEL`.
            before: the same of the step that was measured before; empty at first.
        """
        lasting = [min(values[name], finite(before.get(name, 0.0))) for name in LASTING]
        # with feedback a message of zeros may arrive as something else
        is_nothing = values["message_norm"] == 0
        names = ("token_error", "gradient_error", "lost_rows")
        error, gradient, lost = (math.nan if is_nothing else values[name] for name in names)
        # the error of a gradient is no harm where it averages out
        found = LOSSLESS._replace(residual=lasting[0], nonfinite=lasting[1])
        if direction == "forward":
            return found._replace(error=error, lost_rows=lost)
        return found._replace(gradient_error=gradient)

    @classmethod
    def worst(cls, of_channels: Iterable["MessageQuality"]) -> "MessageQuality":
        """Return the largest of each measurement that is known."""
        return cls(*(max(values, key=finite) for values in zip(*of_channels)))

    def shares(self, guard: GuardOptions) -> dict[str, float]:
        """Return the errors as shares of their limits, by the name of the limit."""
        return {name: getattr(self, name) / getattr(guard, name) for name in ("error", "gradient_error")}

    def violations(self, guard: GuardOptions) -> list[Violation]:
        """Return the limits that are exceeded; nan, which means not known, exceeds none."""
        found = {
            "error": (f"a token error of {self.error:.2f}", LOST),
            "gradient_error": (f"an error of accumulated gradients of {self.gradient_error:.2f}", DRIFTS),
            "residual": (f"a residual of {self.residual:.3g} messages", GROWS),
            "nonfinite": (f"inf or nan in {self.nonfinite:.0%} of all", BREAKS),
        }
        violations = [
            Violation(name, f"{words} (ds_compress.guard.{name}: {getattr(guard, name):g})", advice)
            for name, (words, advice) in found.items()
            if getattr(self, name) > getattr(guard, name)
        ]
        if self.lost_rows > 0:
            share = f"{100 * self.lost_rows:.3g} %"
            words = f"nothing left of {share} of the tokens, whose gradients a norm then amplifies"
            violations.append(Violation("lost_rows", words, LOST))
        return violations


def place_of(boundaries: Sequence[int], direction: str) -> str:
    """Return the place of what `MessageQuality.worst` found in a direction of `boundaries`."""
    return f"{shown_boundaries(boundaries)}, {direction}{', at worst' * (len(boundaries) > 1)}"


def finite(value: float) -> float:
    """Return `value`, but 0 for nan, and the largest number for inf."""
    return 0.0 if math.isnan(value) else min(value, sys.float_info.max)


LOSSLESS = MessageQuality(*[0.0] * 5)
"""Measurements of a message that arrives bit-identical."""
