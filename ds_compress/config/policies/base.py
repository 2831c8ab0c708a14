"""What a policy is: it says between steps on which rung of its ladder each direction of a boundary stands.

A ladder is a list of values of options of the codec of a direction, from mild to strong:

    "policy": {"name": "accordion", "forward": {"bits": [8, 4]}, "backward": {"density": [0.5, 0.1]}}

Adding a policy is one class with `@POLICIES.register("mine")`: `decide` gets numbers that are the same on all
ranks, and a state of JSON types that checkpoints keep; so all ranks decide alike, and a resumed run goes on.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import field_validator

from ds_compress.errors import shown
from ds_compress.registry import Named, Options, Registry

Place = tuple[int, str]
"""A boundary and a direction."""

State = dict[str, Any]
MOST_RUNGS = 16


@dataclass(frozen=True)
class Signal:
    """What is known of a direction of a boundary, from all replicas together."""

    norm: float = math.nan
    """Mean of the norms of the boundary's gradient messages since the decision before, loss scale taken out,
    before compression; nan where none was finite."""

    errors: tuple[float, ...] = ()
    """By rung: the relative error that a message of this step would have there, the largest of all replicas;
    nan where it was not finite."""

    step_bytes: tuple[float, ...] = ()
    """By rung: bytes of a step, of one replica."""


@dataclass(frozen=True)
class Now:
    """What a policy decides from, the same on all ranks."""

    step: int
    """Optimizer steps done since the warm-up."""

    samples: int
    """That training has seen, in all replicas, warm-up included."""

    rungs: Mapping[Place, int]
    """In force; 0 is the mildest."""

    ladder_lengths: Mapping[Place, int]
    """How many rungs there are."""

    lr: float = 0.0
    """Largest learning rate of the optimizer, where the policy asks for signals."""

    signals: Mapping[Place, Signal] | None = None
    """Where the policy asks for them."""


class LadderOptions(Options):
    forward: dict[str, list[Any]] = {}
    """For activations: options of the codec, each with its values from mild to strong; none: nothing
    changes."""

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
        """The values of each rung, by option."""
        values: dict[str, list[Any]] = getattr(self, direction)
        return [dict(zip(values, rung)) for rung in zip(*values.values())]


class Policy(Named, ABC):
    """Decides between steps."""

    Options: ClassVar[Any] = LadderOptions
    norms: ClassVar[bool] = False  # whether it needs `Signal.norm`
    errors: ClassVar[bool] = False  # whether it needs `Signal.errors`: each rung tries a message of the step

    @property
    def measures(self) -> bool:
        """Whether what it decides from takes a collective."""
        return self.norms or self.errors

    def due(self, step: int) -> bool:
        """Whether it decides after `step` steps since the warm-up."""
        return step > 0 and step % self.options.every == 0

    def check_state(self, state: State) -> None:
        """Check `state`, just read from a checkpoint.

        Raises:
            CompressionError: `decide` never leaves such a state.
        """

    @abstractmethod
    def decide(self, now: Now, state: State) -> dict[Place, int]:
        """The rung of every place from the next step on.

        Args:
            state: what it noted itself, of JSON types; it may change it.
        """


POLICIES: Registry[Policy] = Registry("policy", Policy)


@POLICIES.register("constant")
class Constant(Policy):
    """Settings stay as they are."""

    Options = Options

    def due(self, step: int) -> bool:
        return False

    def decide(self, now: Now, state: State) -> dict[Place, int]:
        return dict(now.rungs)


def in_words(rung: Mapping[str, Any]) -> str:
    """Of options and values: "bits 4, group_size 64"."""
    return ", ".join(f"{name} {shown(value)}" for name, value in rung.items())
