"""Quality classes: how much of a message may be lost, where the settings choose themselves."""

from dataclasses import dataclass
from typing import Literal

Quality = Literal["lossless", "safe", "balanced", "aggressive"]


@dataclass(frozen=True)
class Limits:
    """Largest relative errors ||x - C(x)|| / ||x|| of messages, by direction."""

    forward: float
    backward: float

    def allow(self, forward: float, backward: float) -> bool:
        """Whether errors are small enough."""
        return forward <= self.forward and backward <= self.backward


LIMITS: dict[Quality, Limits] = {
    "lossless": Limits(0.0, 0.0),
    "safe": Limits(0.10, 0.13),
    "balanced": Limits(0.15, 0.18),
    "aggressive": Limits(0.19, 0.19),
}
"""The errors of settings that were measured, rounded to 0.01, by what became of a small ResNet (accuracy
without: 53.8 to 54.6 % over seeds) and of a small GPT under them. Within safe: at most 1 % of perplexity;
within balanced: 0.8 points of accuracy, 4 % of perplexity where evaluation compresses too, none where it does
not; within aggressive: 1.5 points of accuracy. docs/auto.md has the rows; `make reproduce` makes them."""

DEFAULT: Quality = "safe"
