"""Error budgets: the largest errors of messages, if recipe "auto" chooses the settings.

An error budget promises what the recipe of its name does (`recipes.EVIDENCE`). Its limits are the largest
errors of that recipe on the language models that it was judged on.
"""

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
    "safe": ErrorLimits(0.03, 0.12),
    "balanced": ErrorLimits(0.05, 0.17),
    "aggressive": ErrorLimits(0.07, 0.23),
}
"""The largest errors in any row of a language model in results/small.jsonl, rounded up to 0.01."""

DEFAULT: Quality = "safe"
