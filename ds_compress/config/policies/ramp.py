"""Ramp: from mild to strong as training goes on."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_compress.config.policies.base import POLICIES, LadderOptions, Now, Place, Policy, State


@POLICIES.register("ramp")
class Ramp(Policy):
    """From the mildest rung to the strongest, at equal distances between two points of training.

    Early steps, which turn the most, lose the least. It takes no number from any rank but the steps that are
    done.
    """

    class Options(LadderOptions):
        unit: Literal["steps", "samples"] = "steps"
        """What is counted: optimizer steps since the warm-up, or samples of all replicas, with the
        warm-up."""

        start: int = Field(default=0, ge=0, le=10**12)
        """Up to here the mildest rung holds."""

        end: int = Field(ge=1, le=10**12)
        """From here on the strongest holds; after `start`."""

        @field_validator("end")
        @classmethod
        def _after(cls, value: int, info: ValidationInfo) -> int:
            if value <= info.data.get("start", 0):
                raise ValueError("is not allowed; allowed: more than 'start'")
            return value

    def due(self, step: int) -> bool:
        return step >= 0

    def decide(self, now: Now, state: State) -> dict[Place, int]:
        options, done = self.options, now.step if self.options.unit == "steps" else now.samples
        way, whole = done - options.start, options.end - options.start
        return {
            place: min(max(way * (length - 1) // whole, 0), length - 1)
            for place, length in now.ladder_lengths.items()
        }
