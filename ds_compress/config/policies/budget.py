"""Policy budget: fewest bytes within an error limit."""

import math

from pydantic import Field

from ds_compress.config.policies.base import (
    POLICIES,
    ChannelKey,
    DecisionInput,
    LadderOptions,
    Policy,
    Signal,
    State,
)


@POLICIES.register("budget")
class Budget(Policy):
    """Fewest bytes within an error limit at every boundary.

    At each decision every rung compresses a message of the step, feedback included, so its error is known
    before it is used. Training begins at the mildest rung.
    """

    errors = True

    class Options(LadderOptions):
        every: int = Field(default=100, ge=1, le=10**9)
        """Steps between two decisions; each costs an encode and a decode per rung."""
        error: float = Field(gt=0, le=1e6)
        """Limit of the error at each boundary: of activations the relative error of a message, of gradients
        the error of the accumulated gradient, as `guard.gradient_error` has it."""
        hysteresis: float = Field(default=0.2, ge=0, lt=1)
        """A stronger rung must stay below the limit by this fraction, because messages between two decisions
        differ from the measured one (by up to a fifth in tests/runtime/test_policies_pay.py)."""

    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        """Choose each rung by its own errors."""
        return {key: self._under(rung, (now.signals or {})[key]) for key, rung in now.rungs.items()}

    def _under(self, present: int, signal: Signal) -> int:
        """Return the rung with the fewest bytes within the error limit."""
        errors, sizes, limit = signal.errors, signal.step_bytes, self.options.error
        if any(map(math.isnan, errors)):  # the message overflowed: no information
            return present

        most = (1 - self.options.hysteresis) * limit
        allowed = [rung for rung, error in enumerate(errors) if error <= most] or [errors.index(min(errors))]
        best = min(allowed, key=lambda rung: (sizes[rung], errors[rung]))
        return best if errors[present] > limit or sizes[best] < sizes[present] else present
