"""Policy accordion: the mild setting while the gradient changes fast, else the strong one."""

import math
from typing import Any

from pydantic import Field, field_validator

from ds_compress.config.policies.base import POLICIES, ChannelKey, DecisionInput, LadderOptions, Policy, State
from ds_compress.errors import CompressionError, shown

LR_DROP = 0.5
"""The learning rate has dropped if it is at most this fraction of that at the previous decision."""


@POLICIES.register("accordion")
class Accordion(Policy):
    """Mild setting while the gradient norm changes fast or after a drop of the learning rate, else strong.

    Agarwal et al., arXiv 2010.16248. Every E steps, with G the norm of the gradient, a phase is critical if
    |G_before - G| / G_before >= threshold, if the learning rate has dropped, and at the first decision. G is
    the mean norm of a boundary's gradient messages before compression, divided by the loss scale. It
    decides for both directions, as norms of activations hardly fall during training. A learning rate that
    decays a little at every step does not count as a drop.
    """

    norms = True

    class Options(LadderOptions):
        every: int = Field(default=100, ge=1, le=10**9)
        """Steps between two decisions; the norm is averaged over them."""
        threshold: float = Field(default=0.5, gt=0, le=1e6)
        """Relative change of the norm at or above which a boundary is in a critical phase."""

        @field_validator("forward", "backward")
        @classmethod
        def _two(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
            if any(len(values) != 2 for values in value.values()):
                raise ValueError('is not allowed; allowed: two values each, such as {"bits": [8, 4]}')
            return value

    def check_state(self, state: State) -> None:
        """Check that a state read from a checkpoint holds finite numbers only."""
        norms = state.get("norms", {})
        numbers = [state.get("lr", 0.0), *(norms.values() if isinstance(norms, dict) else [None])]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise CompressionError(f"policy: state {shown(state)} is none of 'accordion'")

    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        """Choose the mild rung for boundaries in a critical phase, the strong rung for the others."""
        signals = now.signals or {}
        dropped = "lr" in state and now.lr <= LR_DROP * state["lr"]
        state["lr"] = now.lr
        norms, before = state.setdefault("norms", {}), dict(state.get("norms", {}))
        rungs = {}
        for channel in now.rungs:
            norm, key = signals[channel].norm, str(channel[0])
            rungs[channel] = 0 if dropped or self._critical(before.get(key), norm) else 1
            if math.isfinite(norm):
                norms[key] = norm
        return rungs

    def _critical(self, before: float | None, norm: float) -> bool:
        """Return whether the norm has changed by the threshold or more, or cannot be compared."""
        if before is None or not math.isfinite(norm):
            return True
        return abs(before - norm) >= self.options.threshold * before and norm != before
