"""The policy contract: a policy selects, between steps, the rung of each direction of each boundary.

A ladder lists values of options of a direction's codec, from mild to strong; each entry is a rung:

    "policy": {"name": "accordion", "forward": {"bits": [8, 4]}, "backward": {"density": [0.5, 0.1]}}

To add a policy, register a class with `@POLICIES.register("mine")`. Its `decide` gets numbers that are equal
on all ranks, so all ranks decide alike. It also gets a state of JSON types, which checkpoints store for a
resume.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import field_validator

from ds_compress.errors import shown
from ds_compress.registry import Named, Options, Registry

ChannelKey = tuple[int, str]
"""A boundary and a direction."""

State = dict[str, Any]
MOST_RUNGS = 16


@dataclass(frozen=True)
class Signal:
    """What all replicas measured in one direction of a boundary."""

    norm: float = math.nan
    """Mean norm of the boundary's gradient messages since the previous decision, before compression, divided
    by the loss scale; nan if none was finite."""


@dataclass(frozen=True)
class DecisionInput:
    """The input of a decision, equal on all ranks."""

    step: int
    """Number of optimizer steps since the warm-up."""
    rungs: Mapping[ChannelKey, int]
    """Current rungs; 0 is the mildest."""
    ladder_lengths: Mapping[ChannelKey, int]
    """Number of rungs of each ladder."""
    lr: float = 0.0
    """Largest learning rate of the optimizer, if the policy needs signals."""
    signals: Mapping[ChannelKey, Signal] | None = None
    """None if the policy needs no signals."""


class LadderOptions(Options):
    """Options of a policy with ladders, one for each direction."""

    forward: dict[str, list[Any]] = {}
    """For activations: options of the codec, each with its values from mild to strong; empty: settings do
    not change."""
    backward: dict[str, list[Any]] = {}
    """The same for gradients."""

    @field_validator("forward", "backward")
    @classmethod
    def _one_length(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        lengths = {len(values) for values in value.values()}
        if len(lengths) > 1 or not all(2 <= length <= MOST_RUNGS for length in lengths):
            raise ValueError(
                f"is not allowed; allowed: lists of equal length with 2 to {MOST_RUNGS} values, mild to "
                'strong, such as {"bits": [8, 4]}'
            )
        return value

    def rungs(self, direction: str) -> list[dict[str, Any]]:
        """Return the options of each rung, mildest first."""
        values: dict[str, list[Any]] = getattr(self, direction)
        return [dict(zip(values, rung)) for rung in zip(*values.values())]


class Policy(Named, ABC):
    """Base class of policies, which select rungs between steps."""

    Options: ClassVar[Any] = LadderOptions
    norms: ClassVar[bool] = False  # whether it needs `Signal.norm`: a decision takes a collective

    def due(self, step: int) -> bool:
        """Return whether the policy decides after `step` steps since the warm-up."""
        return step > 0 and step % self.options.every == 0

    def check_state(self, state: State) -> None:
        """Check a state that was read from a checkpoint.

        Raises:
            CompressionError: `decide` never leaves such a state.
        """

    @abstractmethod
    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        """Return the rung of every boundary and direction from the next step on.

        Args:
            state: the policy's own state, of JSON types; `decide` may change it.
        """


POLICIES: Registry[Policy] = Registry("policy", Policy)


@POLICIES.register("constant")
class Constant(Policy):
    """Settings do not change."""

    Options = Options

    def due(self, step: int) -> bool:
        return False

    def decide(self, now: DecisionInput, state: State) -> dict[ChannelKey, int]:
        return dict(now.rungs)


def format_rung(rung: Mapping[str, Any]) -> str:
    """Format options and values, as in "bits 4, group_size 64"."""
    return ", ".join(f"{name} {shown(value)}" for name, value in rung.items())
