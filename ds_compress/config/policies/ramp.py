"""Policy ramp: from the mildest to the strongest setting during training."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_compress.config.policies.base import POLICIES, ChannelKey, DecisionInput, LadderOptions, Policy, State


@POLICIES.register("ramp")
class Ramp(Policy):
    """From the mildest to the strongest rung, in equal intervals between two points of training.

    Early steps, which change the direction of training most, then have the smallest error. Decisions need no
    collective: they only depend on the number of steps done.
    """

    class Options(LadderOptions):
        unit: Literal["steps", "samples"] = "steps"
        """Unit of `start` and `end`: optimizer steps since the warm-up, or samples of all replicas, warm-up
        included."""
        start: int = Field(default=0, ge=0, le=10**12)
        """The mildest rung is used up to here."""
        end: int = Field(ge=1, le=10**12)
        """The strongest rung is used from here on; larger than `start`."""

        @field_validator("end")
        @classmethod
        def _after(cls, value: int, info: ValidationInfo) -> int:
            if value <= info.data.get("start", 0):
                raise ValueError("is not allowed; allowed: more than 'start'")
            return value

    def due(self, step: int) -> bool:
        return step >= 0

    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        """Choose the rung by the number of steps or samples done."""
        options, done = self.options, now.step if self.options.unit == "steps" else now.samples
        way, whole = done - options.start, options.end - options.start
        return {
            key: min(max(way * (length - 1) // whole, 0), length - 1)
            for key, length in now.ladder_lengths.items()
        }
