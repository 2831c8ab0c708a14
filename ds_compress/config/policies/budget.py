"""Budget: as few bytes as an error allows, or as little error as the bytes allow."""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field, ValidationInfo, field_validator

from ds_compress.config.policies.base import POLICIES, LadderOptions, Now, Place, Policy, Signal, State


@POLICIES.register("budget")
class Budget(Policy):
    """The fewest bytes whose error stays under a limit at every boundary, or the smallest total error within
    so many bytes per step.

    Every so many steps each rung tries a message of the step, feedback included, and what is lost there is
    known before it is in force. It begins with the mildest.
    """

    errors = True

    class Options(LadderOptions):
        every: int = Field(default=100, ge=1, le=10**9)
        """Steps between two decisions; each costs an encode and a decode per rung."""

        error: float | None = Field(default=None, gt=0, le=1e6)
        """Limit of the relative error of a message, in each direction of each boundary."""

        step_bytes: int | None = Field(default=None, ge=1, le=10**15, validate_default=True)
        """Limit of the bytes of a step, of all boundaries with a ladder together, in both directions, for one
        replica; instead of `error`."""

        hysteresis: float = Field(default=0.2, ge=0, lt=1)
        """A stronger rung has to stay under the limit by this part of it, as messages between two decisions
        differ from the one that was tried (by up to a fifth in tests/runtime/test_policies_pay.py); with
        `step_bytes`: other rungs have to be better by this part of the total error."""

        @field_validator("step_bytes")
        @classmethod
        def _one(cls, value: int | None, info: ValidationInfo) -> int | None:
            if (value is None) == (info.data.get("error") is None):
                raise ValueError("is not allowed for 'step_bytes'; give one of it and 'error', as a number")
            return value

    def decide(self, now: Now, state: State) -> dict[Place, int]:
        signals = now.signals or {}
        if self.options.error is not None:
            return {place: self._under(now.rungs[place], signals[place]) for place in now.rungs}
        return self._within(now.rungs, signals)

    def _under(self, present: int, signal: Signal) -> int:
        """The rung of the fewest bytes under the limit of the error."""
        errors, sizes, limit = signal.errors, signal.step_bytes, self.options.error
        if any(map(math.isnan, errors)):  # a message that overflowed tells nothing
            return present

        most = (1 - self.options.hysteresis) * limit
        allowed = [rung for rung, error in enumerate(errors) if error <= most] or [errors.index(min(errors))]
        best = min(allowed, key=lambda rung: (sizes[rung], errors[rung]))
        return best if errors[present] > limit or sizes[best] < sizes[present] else present

    def _within(self, present: Mapping[Place, int], signals: Mapping[Place, Signal]) -> dict[Place, int]:
        """The rungs of the smallest total error within the bytes: from the mildest on, always the step that
        adds the least error for the bytes that it spares."""
        if any(math.isnan(error) for signal in signals.values() for error in signal.errors):
            return dict(present)
        found = {place: signals[place].errors.index(min(signals[place].errors)) for place in present}
        while _total(signals, found, "step_bytes") > self.options.step_bytes:
            steps = [step for place, rung in found.items() for step in _steps(place, rung, signals[place])]
            if not steps:
                break
            _, place, rung = min(steps)
            found[place] = rung
        fits = _total(signals, present, "step_bytes") <= self.options.step_bytes
        enough = (1 - self.options.hysteresis) * _total(signals, present, "errors")
        return dict(present) if fits and _total(signals, found, "errors") >= enough else found


def _total(signals: Mapping[Place, Signal], rungs: Mapping[Place, int], what: str) -> float:
    return math.fsum(getattr(signals[place], what)[rung] for place, rung in sorted(rungs.items()))


def _steps(place: Place, rung: int, signal: Signal) -> Sequence[tuple[float, Place, int]]:
    """Error added per byte spared, place and rung, of each rung that takes fewer bytes."""
    errors, sizes = signal.errors, signal.step_bytes
    return [
        ((errors[other] - errors[rung]) / (sizes[rung] - sizes[other]), place, other)
        for other in range(len(errors))
        if sizes[other] < sizes[rung]
    ]
