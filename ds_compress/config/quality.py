"""Quality classes: how much of a message may be lost, where the settings choose themselves."""

from dataclasses import dataclass
from typing import Literal

Quality = Literal["lossless", "safe", "balanced", "aggressive"]


@dataclass(frozen=True)
class ErrorLimits:
    """Largest errors of messages: relative ones ||x - C(x)|| / ||x|| of activations, and of gradients those
    of what an optimizer accumulates (`message.gradient_error`)."""

    forward: float
    backward: float

    def allow(self, forward: float, backward: float) -> bool:
        """Return whether errors are small enough."""
        return forward <= self.forward and backward <= self.backward


LIMITS: dict[Quality, ErrorLimits] = {
    "lossless": ErrorLimits(0.0, 0.0),
    "safe": ErrorLimits(0.10, 0.12),
    "balanced": ErrorLimits(0.19, 0.16),
    "aggressive": ErrorLimits(0.21, 0.25),
}
"""The errors of settings that were measured, rounded up to 0.01: of 4 bits rotated and 3 bits entropy coded,
of 3 bits rotated, and of 2.5 bits entropy coded, under a small ResNet and a small GPT. docs/auto.md has the
rows and what they cost; `make reproduce` makes them."""

DEFAULT: Quality = "safe"
