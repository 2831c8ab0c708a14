"""Policy budget: fewest bytes within an error limit, or smallest error within a byte limit."""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field, ValidationInfo, field_validator

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
    """Fewest bytes within an error limit at every boundary, or smallest total error within a byte limit.

    At each decision every rung compresses a message of the step, feedback included, so its error is known
    before it is used. Training begins at the mildest rung.
    """

    errors = True

    class Options(LadderOptions):
        every: int = Field(default=100, ge=1, le=10**9)
        """Steps between two decisions; each costs an encode and a decode per rung."""
        error: float | None = Field(default=None, gt=0, le=1e6)
        """Limit of the error at each boundary: of activations the relative error of a message, of gradients
        the error of the accumulated gradient, as `guard.gradient_error` has it."""
        step_bytes: int | None = Field(default=None, ge=1, le=10**15, validate_default=True)
        """Limit of the bytes that one replica sends in a step, summed over all boundaries with a ladder and
        both directions; excludes `error`."""
        hysteresis: float = Field(default=0.2, ge=0, lt=1)
        """With `error`: a stronger rung must stay below the limit by this fraction, because messages between
        two decisions differ from the measured one (by up to a fifth in tests/runtime/test_policies_pay.py).
        With `step_bytes`: other rungs must reduce the total error by this fraction."""

        @field_validator("step_bytes")
        @classmethod
        def _one(cls, value: int | None, info: ValidationInfo) -> int | None:
            if (value is None) == (info.data.get("error") is None):
                raise ValueError("is not allowed for 'step_bytes'; give one of it and 'error', as a number")
            return value

    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        """Choose rungs by the error limit or the byte limit, whichever is set."""
        signals = now.signals or {}
        if self.options.error is not None:
            return {key: self._under(now.rungs[key], signals[key]) for key in now.rungs}
        return self._within(now.rungs, signals)

    def _under(self, present: int, signal: Signal) -> int:
        """Return the rung with the fewest bytes within the error limit."""
        errors, sizes, limit = signal.errors, signal.step_bytes, self.options.error
        if any(map(math.isnan, errors)):  # the message overflowed: no information
            return present

        most = (1 - self.options.hysteresis) * limit
        allowed = [rung for rung, error in enumerate(errors) if error <= most] or [errors.index(min(errors))]
        best = min(allowed, key=lambda rung: (sizes[rung], errors[rung]))
        return best if errors[present] > limit or sizes[best] < sizes[present] else present

    def _within(
        self, present: Mapping[ChannelKey, int], signals: Mapping[ChannelKey, Signal]
    ) -> dict[ChannelKey, int]:
        """Return the rungs with the smallest total error within the byte limit.

        A greedy search: start at the smallest errors, and repeat the change of rung that adds the least error
        per
        byte saved.
        """
        if any(math.isnan(error) for signal in signals.values() for error in signal.errors):
            return dict(present)
        found = {key: signals[key].errors.index(min(signals[key].errors)) for key in present}
        while _total(signals, found, "step_bytes") > self.options.step_bytes:
            steps = [step for key, rung in found.items() for step in _steps(key, rung, signals[key])]
            if not steps:
                break
            _, key, rung = min(steps)
            found[key] = rung
        fits = _total(signals, present, "step_bytes") <= self.options.step_bytes
        enough = (1 - self.options.hysteresis) * _total(signals, present, "errors")
        return dict(present) if fits and _total(signals, found, "errors") >= enough else found


def _total(signals: Mapping[ChannelKey, Signal], rungs: Mapping[ChannelKey, int], what: str) -> float:
    """Sum one signal over all boundaries and directions, at the given rungs."""
    return math.fsum(getattr(signals[key], what)[rung] for key, rung in sorted(rungs.items()))


def _steps(key: ChannelKey, rung: int, signal: Signal) -> Sequence[tuple[float, ChannelKey, int]]:
    """List the rungs with fewer bytes as (error added per byte saved, boundary and direction, rung)."""
    errors, sizes = signal.errors, signal.step_bytes
    return [
        ((errors[other] - errors[rung]) / (sizes[rung] - sizes[other]), key, other)
        for other in range(len(errors))
        if sizes[other] < sizes[rung]
    ]
