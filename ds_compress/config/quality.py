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
    "safe": Limits(0.10, 0.10),
    "balanced": Limits(0.15, 0.15),
    "aggressive": Limits(0.25, 0.20),
}
DEFAULT: Quality = "safe"
