"""The "ds_compress" block of ds_config.json: every option, default and check.

Codec and feedback options stand with their classes (`ds-compress list`); everything else stands here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

import ds_compress.codecs  # noqa: F401  (registers them)
from ds_compress.codec import CODECS, Codec
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS, Feedback
from ds_compress.feedback.sample_ids import SampleIds
from ds_compress.registry import Options, validate

KEY = "ds_compress"
DIRECTIONS = ("forward", "backward")


class Direction(Options):
    codec: Any = "none"
    """Name of a codec, or an object with its name and options."""
    feedback: Any = "none"
    """Name of a feedback, or an object with its name and options."""


class Override(Options):
    """What a boundary changes: a direction that is given replaces codec, feedback, or both."""

    forward: Direction | None = None
    backward: Direction | None = None


class Policy(Options):
    name: Literal["constant"] = "constant"
    """constant: the same settings at every step after the warm-up."""


class Link(Options):
    mode: Literal["blocking", "eager"] = "eager"
    """blocking: DeepSpeed's own order of sends and receives; eager: sent when computed, received ahead.
    DualPipeV posts its receives ahead by itself and has one order for both."""

    timeout_s: float = Field(1800.0, gt=0)
    """Seconds that a neighbour may take to send or to take a message before this rank stops with an error; on
    a GPU NCCL counts them. What DeepSpeed itself waits for keeps the time-out of deepspeed.init_distributed,
    also 1800."""

    checksum: bool = False
    """Add a CRC-32 of every packet and check it; on a GPU each packet is then copied to the host for it."""


class Checkpoint(Options):
    state: Literal["exact", "int8", "delta"] = "exact"
    """How checkpoints hold the state of feedbacks. int8 (a scale for each 128 values) changes it on resuming,
    on both sides alike. delta: the same error, and what both sides hold (ef21, aqsgd) is stored as changes to
    the checkpoint before, which has to stay; the first checkpoint of a run and every ninth after it are
    complete."""


class Monitor(Options):
    every: int = Field(10, ge=0)
    """Write the counters every so many steps; 0: never."""


class Block(Options):
    """The block as the user wrote it, with defaults filled in."""

    enabled: bool = True
    """False: nothing of DeepSpeed is changed, as if the key were absent."""
    forward: Direction = Direction()
    """Activations, from stage b to b+1."""
    backward: Direction = Direction()
    """Gradients, from stage b+1 to b."""
    boundaries: dict[str, Override] = {}
    """Other settings for single boundaries, by number: "0" is the cut between stages 0 and 1."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps at the start of training in which every message crosses uncompressed."""
    warmup_epochs: int = Field(0, ge=0)
    """The same in passes over the `training_data` given to `deepspeed.initialize`, instead of steps."""
    policy: Policy = Policy()
    eval: Literal["compressed", "uncompressed"] = "compressed"
    """Whether messages of eval_batch are compressed (without feedback); after the warm-up."""
    min_numel: int = Field(4096, ge=0)
    """Tensors with fewer elements cross as they are."""
    tensors: Any = "large"
    """Which float tensors of a message are compressed, in both directions: "large", those of min_numel
    elements or more, or a list of positions, [0, 2], whatever their size. Positions count the float tensors
    of a message alone; all other tensors, and bool masks, cross as they are."""
    link: Link = Link()
    mirror_check: int = Field(100, ge=0, le=1_000_000_000)
    """Compare what both sides of a boundary hold alike (ef21, aqsgd) every so many steps, by hash; where it
    differs both start from zero, and a line says so. 0: never."""
    checkpoint: Checkpoint = Checkpoint()
    monitor: Monitor = Monitor()
    seed: int = Field(1234, ge=0)
    """Seed of every random choice; with boundary, direction, step and micro-batch."""

    @field_validator("tensors")
    @classmethod
    def _positions(cls, value: object) -> object:
        is_list = isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value)
        if value != "large" and not is_list:
            raise ValueError(
                'is not allowed; allowed: "large", or a list of positions from 0, such as [0, 2]'
            )
        return value

    @field_validator("boundaries", mode="before")
    @classmethod
    def _numbered(cls, value: object, info: ValidationInfo) -> object:
        for key in value if isinstance(value, dict) else ():
            if not str(key).isdecimal():
                raise ValueError(f'key {key!r} is not the number of a boundary ("0", "1", ...)')
        return value


@dataclass(frozen=True)
class BoundaryCodecs:
    """The codecs of one boundary, feedback included."""

    forward: Codec
    backward: Codec

    @property
    def settings(self) -> dict[str, Any]:
        return {direction: getattr(self, direction).settings for direction in DIRECTIONS}


@contextmanager
def _errors_at(path: str) -> Iterator[None]:
    """Begin the line of a CompressionError with `path`."""
    try:
        yield
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}") from None


class Config:
    """The checked block: plain options, and the codecs of any boundary."""

    def __init__(self, block: object):
        """Check `block`, the JSON value of the "ds_compress" key.

        Raises:
            CompressionError: one line with the JSON path of the first mistake.
        """
        if not isinstance(block, dict):
            raise CompressionError(
                f'{KEY}: {block!r} is not an object; write "{KEY}": {{...}} with the options'
            )
        self.block = validate(Block, block, KEY)
        self.warmup_steps = self.block.warmup_steps
        if self.block.warmup_steps and self.block.warmup_epochs:
            epochs = self.block.warmup_epochs
            raise CompressionError(
                f"{KEY}.warmup_epochs: {epochs} came together with warmup_steps; use one of them"
            )
        self.notes: dict[str, None] = {}  # lines for the user, in order, each once
        self.codecs(None)
        for number in self.block.boundaries:
            self.codecs(int(number))
        self.sample_ids = self._sample_ids()

    def codecs(self, boundary: int | None) -> BoundaryCodecs:
        """New codec objects for `boundary`; None: for a boundary without settings of its own."""
        forward, forward_feedback = self._choice(boundary, "forward")
        backward, backward_feedback = self._choice(boundary, "backward")
        path = f"{KEY}.boundaries.{boundary}" if str(boundary) in self.block.boundaries else KEY
        for codec, other, direction in ((forward, backward, "backward"), (backward, forward, "forward")):
            if codec.both_directions and other.name != codec.name:
                raise CompressionError(
                    f"{path}.{direction}.codec: {other.name!r} cannot be combined with {codec.name!r} "
                    f"in the other direction; allowed: {codec.name!r} in both"
                )
        if forward.forward_partner() is not None:
            raise CompressionError(
                f"{path}.forward.codec: {forward} takes over from a forward message; allowed backward only"
            )
        for feedback, direction in ((forward_feedback, "forward"), (backward_feedback, "backward")):
            if direction not in feedback.directions:
                raise CompressionError(
                    f"{path}.{direction}.feedback: {feedback.name!r} is not for this direction; "
                    f"allowed: {', '.join(feedback.directions)}"
                )
        with _errors_at(f"{path}.forward.feedback"):
            forward = forward_feedback.around(forward)
        with _errors_at(f"{path}.backward.codec"):
            backward = backward.paired(forward)
        for codec, direction in ((forward, "forward"), (backward, "backward")):
            if codec.needs_warmup and not (self.block.warmup_steps or self.block.warmup_epochs):
                raise CompressionError(
                    f"{KEY}.warmup_steps: 0 is not allowed with codec {codec.name!r} in "
                    f"{path}.{direction}; use 1 up"
                )
        if backward.note:
            self.notes[f"{path}.backward.codec: {backward.note}"] = None
        with _errors_at(f"{path}.backward.feedback"):
            backward = backward_feedback.around(backward)
        return BoundaryCodecs(forward, backward)

    def count_epochs(self, steps_per_epoch: int | None) -> None:
        """Turn warm-up epochs into steps; None where nobody knows how long an epoch is.

        Raises:
            CompressionError: there are warm-up epochs, and nobody knows.
        """
        if self.block.warmup_epochs and steps_per_epoch is None:
            raise CompressionError(
                f"{KEY}.warmup_epochs: {self.block.warmup_epochs} is not allowed where the length of "
                "an epoch is not known; give deepspeed.initialize the training_data, or use warmup_steps"
            )
        if self.block.warmup_epochs:
            self.warmup_steps = self.block.warmup_epochs * steps_per_epoch

    def prepare(self) -> None:
        """Make what feedbacks need on this machine; every rank calls it before training.

        Raises:
            CompressionError: it cannot be made; names the JSON path of the option.
        """
        for number in (None, *map(int, self.block.boundaries)):
            place = KEY if number is None else f"{KEY}.boundaries.{number}"
            for direction in DIRECTIONS:
                feedback = self._choice(number, direction)[1]
                try:
                    feedback.prepare()
                except CompressionError as error:
                    raise CompressionError(f"{place}.{direction}.feedback.{error}") from error

    @property
    def mirrors(self) -> bool:
        """Whether both sides of some boundary keep state that has to stay the same."""
        return any(feedback.mirrors for _, feedback in self._choices())

    def _choices(self) -> Iterator[tuple[Codec, Feedback]]:
        """Codec and feedback asked for, of all boundaries and directions."""
        for number in (None, *map(int, self.block.boundaries)):
            for direction in DIRECTIONS:
                yield self._choice(number, direction)

    def has_rest(self, direction: str) -> bool:
        """Whether messages of any boundary may come with a second packet."""
        numbers = [None, *map(int, self.block.boundaries)]
        return any(getattr(self.codecs(number), direction).has_rest for number in numbers)

    def check_boundaries(self, count: int) -> None:
        """Refuse settings for a boundary that a pipeline with `count` boundaries does not have."""
        for number in self.block.boundaries:
            if int(number) >= count:
                allowed = (
                    ", ".join(f'"{b}"' for b in range(count))
                    or "none (a pipeline of one stage has no boundary)"
                )
                raise CompressionError(
                    f"{KEY}.boundaries.{number}: there is no such boundary; allowed: {allowed}"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that both ends of a link must agree on, as JSON types, defaults and codec options
        included."""
        plain = self.block.model_dump(mode="json", exclude={"forward", "backward", "boundaries"})
        codecs = {number: self.codecs(int(number)).settings for number in self.block.boundaries}
        return {**self.codecs(None).settings, "boundaries": codecs, **plain}

    def _sample_ids(self) -> SampleIds | None:
        """How samples are known to the feedbacks of all boundaries, None where none needs to know."""
        numbers = [None, *map(int, self.block.boundaries)]
        feedbacks = [self._choice(number, "forward")[1] for number in numbers]
        wanted = {feedback.sample_ids for feedback in feedbacks if feedback.sample_ids is not None}
        if len(wanted) > 1:
            raise CompressionError(
                f"{KEY}: feedbacks of different boundaries want different sample ids; "
                "allowed: equal 'ids', 'scope' and 'batch_dim' everywhere"
            )
        return next(iter(wanted), None)

    def _choice(self, boundary: int | None, direction: str) -> tuple[Codec, Feedback]:
        """Codec and feedback asked for, each from the boundary's own settings where it has them."""
        chosen, path = {}, {}
        layers = [(getattr(self.block, direction), f"{KEY}.{direction}")]
        override = self.block.boundaries.get(str(boundary))
        own = getattr(override, direction) if override else None
        if own is not None:
            layers.append((own, f"{KEY}.boundaries.{boundary}.{direction}"))
        for settings, where in layers:
            for key in ("codec", "feedback"):
                if key in settings.model_fields_set or settings is layers[0][0]:
                    chosen[key], path[key] = getattr(settings, key), f"{where}.{key}"
        codec = CODECS.build(chosen["codec"], path["codec"])
        return codec, FEEDBACKS.build(chosen["feedback"], path["feedback"])
