"""The "ds_compress" block of ds_config.json as the user writes it: every option, its default, its check.

Codec and feedback options stand with their classes (`ds-compress list`); everything else stands here.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ds_compress.config import recipes
from ds_compress.config.quality import Quality
from ds_compress.registry import Options, Steps

KEY = "ds_compress"
DIRECTIONS = ("forward", "backward")


NUMBER = "0|[1-9][0-9]{0,4}"
"""Of a boundary, as a pattern."""


def _number(key: object) -> object:
    """A boundary's number as it is written everywhere: "01", or digits but 0 to 9, would never be found."""
    if not isinstance(key, str) or not re.fullmatch(NUMBER, key):
        raise ValueError('is not the number of a boundary; allowed: "0", "1", ...')
    return key


_POSITIONS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**16 - 1},
}


class DirectionOptions(Options):
    codec: Any = Field(default="none", json_schema_extra={"registry": "codec"})
    """Name of a codec, or an object with its name and options."""
    feedback: Any = Field(default="none", json_schema_extra={"registry": "feedback"})
    """Name of a feedback, or an object with its name and options."""


class BoundaryOptions(Options):
    """What a boundary changes: a direction that is given replaces codec, feedback, or both."""

    forward: DirectionOptions | None = None
    """For activations."""
    backward: DirectionOptions | None = None
    """For gradients."""


class LinkOptions(Options):
    mode: Literal["blocking", "eager"] = "eager"
    """blocking: DeepSpeed's own order of sends and receives; eager: sent when computed, received ahead.
    DualPipeV posts its receives ahead by itself and has one order for both."""

    depth: Annotated[int, Field(ge=1, le=32)] | Literal["auto"] = 1
    """How far stages run ahead of the gradients they wait for: stage s of S has depth * (S - 1 - s) + 1
    forward passes done before its first backward pass, where there are as many micro-batches. 1 is
    DeepSpeed's own schedule; more hides longer round trips, with equal losses, and keeps the activations of
    more micro-batches in memory. "auto": the smallest that is nearly the fastest within `memory_gb`, as
    predicted from what the first steps of training measure; 1 where the link is fast. Over 1 it needs the
    eager link; a schedule that is not DeepSpeed's own, DualPipeV's among them, stays as it is."""

    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    """GB (10^9 bytes) that activations, and packets of the links, under way on a stage may take at most, by
    choice of depth "auto"; null: what a GPU has free after the first steps less a tenth of all it has, on a
    CPU an equal part for each rank of half of what its host has free. What a micro-batch takes is measured in
    the first steps: give a number where later ones are larger."""

    timeout_s: float = Field(default=1800.0, ge=1, le=7 * 24 * 3600)
    """Seconds that a neighbour may take to send or to take a message (on a GPU NCCL counts them), or that a
    rank may be silent while others need it, DeepSpeed's collectives included, before every rank stops with
    one message."""

    checksum: bool = False
    """Add a CRC-32 of every packet and check it; on a GPU each packet is then copied to the host for it."""


class CheckpointOptions(Options):
    state: Literal["exact", "int8", "delta"] = "exact"
    """How checkpoints hold the state of feedbacks. int8 (a scale for each 128 values) changes it on resuming,
    on both sides alike. delta: the same error, and what both sides hold (ef21, aqsgd) is stored as changes to
    the checkpoint before, which has to stay; the first checkpoint of a run and every ninth after it are
    complete."""


class MonitorOptions(Options):
    every: Steps = 10
    """Write the counters every so many steps; 0: never."""


class GuardOptions(Options):
    every: Steps = 200
    """Every so many steps, and once 25 steps after the warm-up, the last micro-batch passes the pipeline
    twice more without training: with compression and without; under DualPipeV, which takes no fewer, all of
    that step. 0: never. Not where activations have a feedback, which evaluation leaves out."""

    loss: float = Field(default=0.05, gt=0, le=1e9)
    """Share of the uncompressed loss that compression may change it by. More: it hurts; less: the model has
    come to need it, and evaluating it without compression would hurt."""

    error: float = Field(default=0.5, gt=0, le=1e9)
    """Relative error of a message, in a step that is looked at or that the monitor measures, beyond which
    there is a warning, once for each boundary and direction; so with the next three."""

    cosine: float = Field(default=0.5, ge=-1, le=1)
    """Cosine between a message and what arrives; less is too little."""

    residual: float = Field(default=100.0, gt=0, le=1e9)
    """What error feedback holds back for a message, as a multiple of that message's norm, in two measured
    steps after each other. A TopK that keeps up may come to half of one over its density."""

    nonfinite: float = Field(default=0.0, ge=0, le=1)
    """Share of a step's messages that hold inf or nan, in two measured steps after each other."""

    action: Literal["warn", "relax", "stop"] = "warn"
    """What happens where compression changes the loss by more, or a message is beyond a limit: one warning,
    or the end of all ranks, of the limits beside `loss` at those alone that the block says. relax: where
    the loss is larger all activations, and where an error, a cosine or a residual is beyond its limit that
    boundary's direction, have twice the bits, the density or the rank from the next step on, and lastly none;
    one line says so. Not together with a policy."""


class Block(Options):
    """The block as the user wrote it, with defaults filled in."""

    enabled: bool | Literal["required"] = True
    """false: nothing of DeepSpeed is changed, as if the key were absent; "required": an engine that cannot
    compress, such as one without a pipeline, is an error rather than a warning. The environment variable
    DS_COMPRESS_REQUIRE=1 says the same for every engine."""
    recipe: str | None = Field(default=None, json_schema_extra=recipes.as_schema)
    """Name of settings that come with the package, as `ds-compress list --recipes` shows them; every other
    key changes them. A codec or a feedback that is given replaces that of the recipe, with all its
    options. "auto": the first three steps, or the last two of a longer warm-up, are measured uncompressed;
    then codecs and depth are chosen for each boundary."""
    quality: Quality | None = None
    """Of recipe "auto": the largest relative errors that messages may have, by direction; "safe" if not
    given. lossless: every bit arrives. docs/auto.md says what each class has cost."""
    forward: DirectionOptions = DirectionOptions()
    """Activations, from stage b to b+1."""
    backward: DirectionOptions = DirectionOptions()
    """Gradients, from stage b+1 to b."""
    boundaries: dict[Annotated[str, BeforeValidator(_number)], BoundaryOptions] = Field(
        {}, json_schema_extra={"propertyNames": {"pattern": f"^({NUMBER})$"}}
    )
    """Other settings for single boundaries, by number: "0" is the cut between stages 0 and 1."""
    warmup_steps: Steps = 0
    """Optimizer steps at the start of training in which every message crosses uncompressed."""
    warmup_epochs: int = Field(default=0, ge=0, le=10**6)
    """The same in passes over the `training_data` given to `deepspeed.initialize`, instead of steps."""
    policy: Any = Field(default="constant", json_schema_extra={"registry": "policy"})
    """Which settings hold at which step: name of a policy, or an object with its name and options."""
    eval: Literal["compressed", "uncompressed", "both"] | None = None
    """Whether messages of eval_batch are compressed (without feedback); after the warm-up. null: where
    activations have a feedback that sends changes (aqsgd, ef21), which have no meaning without it,
    uncompressed, else compressed. both: each batch is evaluated in both ways, one line and two values of the
    monitor say so; eval_batch returns what it does with null."""
    min_numel: int = Field(default=4096, ge=0, le=2**40)
    """Tensors with fewer elements cross as they are."""
    tensors: Any = Field(default="large", json_schema_extra={"anyOf": [{"const": "large"}, _POSITIONS]})
    """Which float tensors of a message are compressed, in both directions: "large", those of min_numel
    elements or more that parameters have touched, or a list of positions, [0, 2], whatever their size.
    Positions count the float tensors of a message alone; all other tensors, and masks, cross as they are."""
    link: LinkOptions = LinkOptions()
    """How messages travel, and how long one may take."""
    state_check_every: int = Field(default=100, ge=0, le=1_000_000_000)
    """Compare what both sides of a boundary hold alike (ef21, aqsgd) every so many steps, by hash; where it
    differs both start from zero, and a line says so. 0: never."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """What `save_checkpoint` keeps of the feedbacks."""
    guard: GuardOptions = GuardOptions()
    """Says when compression hurts."""
    monitor: MonitorOptions = MonitorOptions()
    """What is written where DeepSpeed's monitor writes: W&B, TensorBoard, CSV."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of every random choice; with boundary, direction, step and micro-batch."""

    @field_validator("enabled", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        if value is not True and value is not False and value != "required":
            raise ValueError('is not allowed; allowed: true, false, "required"')
        return value

    @field_validator("tensors")
    @classmethod
    def _positions(cls, value: object) -> object:
        positions = value if isinstance(value, list) else []
        named = positions and all(type(item) is int and 0 <= item < 2**16 for item in positions)
        if value != "large" and not named:
            raise ValueError(
                'is not allowed; allowed: "large", or a list of positions from 0, such as [0, 2]'
            )
        return value
