"""Accordion: mild where the gradient changes fast, strong elsewhere."""

import math
from typing import Any

from pydantic import Field, field_validator

from ds_compress.config.policies.base import POLICIES, LadderOptions, Now, Place, Policy, State
from ds_compress.errors import CompressionError, shown


@POLICIES.register("accordion")
class Accordion(Policy):
    """Mild while the gradient's norm changes fast or the learning rate has dropped, else strong.

    Agarwal et al., arXiv 2010.16248: every E steps, with G the norm of the gradient, critical is where
    |G_before - G| / G_before >= threshold, where the learning rate has dropped, and at first. Here G is the
    mean norm of a boundary's gradient messages before compression, loss scale taken out, and holds for both
    of its directions: norms of activations hardly fall while a model trains. Learning rates that fall a
    little at every step are no drop.
    """

    norms = True

    class Options(LadderOptions):
        every: int = Field(default=100, ge=1, le=10**9)
        """Steps between two decisions, over which the norm is averaged."""

        threshold: float = Field(default=0.5, gt=0, le=1e6)
        """Relative change of the norm from which on a boundary is critical."""

        lr_drop: float = Field(default=0.5, gt=0, lt=1)
        """A learning rate of at most this part of the one at the decision before is a drop."""

        @field_validator("forward", "backward")
        @classmethod
        def _two(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
            if any(len(values) != 2 for values in value.values()):
                raise ValueError('is not allowed; allowed: two values each, such as {"bits": [8, 4]}')
            return value

    def check_state(self, state: State) -> None:
        norms = state.get("norms", {})
        numbers = [state.get("lr", 0.0), *(norms.values() if isinstance(norms, dict) else [None])]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise CompressionError(f"policy: state {shown(state)} is none of 'accordion'")

    def decide(self, now: Now, state: State) -> dict[Place, int]:
        signals = now.signals or {}
        dropped = "lr" in state and now.lr <= self.options.lr_drop * state["lr"]
        state["lr"] = now.lr
        norms, before = state.setdefault("norms", {}), dict(state.get("norms", {}))
        rungs = {}
        for place in now.rungs:
            norm, key = signals[place].norm, str(place[0])
            rungs[place] = 0 if dropped or self._critical(before.get(key), norm) else 1
            if math.isfinite(norm):
                norms[key] = norm
        return rungs

    def _critical(self, before: float | None, norm: float) -> bool:
        if before is None or not math.isfinite(norm):
            return True
        return abs(before - norm) >= self.options.threshold * before and norm != before
