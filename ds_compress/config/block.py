"""The "ds_compress" block of ds_config.json as the user writes it: every option, its default, its check.

Options of codecs, feedbacks and policies are defined with their classes (`ds-compress list`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_compress.config import recipes
from ds_compress.config.recipes import Quality
from ds_compress.config.replicas import ReplicasOptions
from ds_compress.registry import Options, Steps

KEY = "ds_compress"
DIRECTIONS = ("forward", "backward")
MOST_CONNECTIONS = 64
"""Largest `link.connections`."""


NUMBER = "0|[1-9][0-9]{0,4}"
"""Pattern of a boundary's number."""


def _number(key: object) -> object:
    """Check that a boundary's number is written as everywhere: "01" or other digits would never be found."""
    if not isinstance(key, str) or not re.fullmatch(NUMBER, key):
        raise ValueError('is not the number of a boundary; allowed: "0", "1", ...')
    return key


TensorPosition = Annotated[int, Field(ge=0, le=2**16 - 1)]
"""Number of a float tensor among those of a message."""


class DirectionOptions(Options):
    codec: Any = Field(default="none", json_schema_extra={"registry": "codec"})
    """Name of a codec, or an object with its name and options."""
    feedback: Any = Field(default="none", json_schema_extra={"registry": "feedback"})
    """Name of a feedback, or an object with its name and options."""


class BoundaryOptions(Options):
    """Settings of one boundary; a direction that is given replaces codec, feedback, or both."""

    forward: DirectionOptions | None = None
    """For activations."""
    backward: DirectionOptions | None = None
    """For gradients."""


class LinkOptions(Options):
    mode: Literal["blocking", "eager"] = "eager"
    """blocking: DeepSpeed's own order of sends and receives. eager: messages are sent as soon as they are
    computed, and receives are posted ahead. DualPipeV posts receives ahead in both modes."""
    depth: Annotated[int, Field(ge=1, le=32)] | Literal["auto"] = 1
    """How many more micro-batches stages keep in flight: stage s of S does depth * (S - 1 - s) + 1 forward
    passes before its first backward pass, if there are as many micro-batches. 1 is DeepSpeed's own schedule.
    A greater depth hides longer round trips, with equal losses, and keeps more activations in memory. "auto":
    the first steps are measured, then the smallest depth is chosen whose predicted step is nearly the fastest
    within `memory_gb`; 1 where the link is fast. A depth over 1 needs the eager link. Schedules other than
    DeepSpeed's own, such as DualPipeV's, ignore it."""
    connections: Annotated[int, Field(ge=1, le=MOST_CONNECTIONS)] | Literal["auto"] = 1
    """TCP connections of each direction of a boundary, and of exchanges of gradients, between replicas or of
    tied weights: a packet of 64 KiB or more is sent in as many parts, one over each: for links that lose
    packets, on which one connection is slow. On others it may cost some percent. Packets and results are the
    same. "auto": before the first step, and after a checkpoint was loaded, links are probed with 1, 4, 16 and
    64, until two in a row are not faster; the job uses the smallest number with which its slowest link has
    nearly the best rate: 1 where neither lost packets nor socket buffers limit one. It needs the eager link;
    over NCCL, which opens connections of its own, and under DualPipeV it has no effect, nor has "auto" with
    dynamic shapes. Sums of factors (codec lowrank) have one. To the store of several sites, each rank has as
    many more, with "auto" 4; whatever the backend."""
    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    """With depth "auto": GB (10^9 bytes) that activations and packets in flight may take on a stage. null: on
    a GPU, what is free after the first steps less a tenth of its memory; on a CPU, an equal share per rank of
    half of the host's free memory. A micro-batch is measured in the first steps: give a number if later
    ones are larger."""
    timeout_s: float = Field(default=1800.0, ge=1, le=7 * 24 * 3600)
    """Seconds after which all ranks stop with one message: a neighbour neither sends nor receives (on a GPU,
    NCCL counts them), or a rank is silent while others need it, DeepSpeed's collectives included."""
    checksum: bool = False
    """Add a CRC-32 to every packet and check it; on a GPU this copies each packet to the host."""


class MonitorOptions(Options):
    every: Steps = 10
    """Steps between two writes of the counters; 0: never."""


FIRST_CHECK = 25
"""Steps after the warm-up until the guard's first check: a setting that hurts does so early."""


class CheckpointOptions(Options):
    codec: Any = Field(default="none", json_schema_extra={"registry": "codec"})
    """Codec of what feedbacks keep, in checkpoints: name, or an object with its name and options. A run that
    resumes starts from what it kept: with "none" and "lossless" all, bit-identically."""


class GuardOptions(Options):
    every: Steps = 200
    """Steps between two checks; one more comes 25 steps after the warm-up. A check runs the last micro-batch
    (under DualPipeV: all of the step) through the pipeline twice, compressed and uncompressed, without
    training on it. 0: never. The loss is not checked if activations have a feedback: evaluation omits it."""
    loss: float = Field(default=0.02, gt=0, le=1e9)
    """Largest change of the loss by compression, as a share of the uncompressed loss. A higher loss means
    that compression hurts; a lower one, that the model now depends on it and loses when evaluated without.
    Harms add up: the change of the loss, the token error and the error of accumulated gradients, each as a
    share of its limit, are also too much together if the root of the sum of their squares is above 1."""
    loss_floor: float = Field(default=0.001, ge=0, le=1e9)
    """Change of the loss, as a share of the loss of the first step, that is allowed whatever `loss` says: any
    share of a loss near zero is nothing."""
    error: float = Field(default=0.5, gt=0, le=1e9)
    """Largest token error of an activation, the root of the mean over tokens of the squared relative error of
    a token, in steps that the guard checks or the monitor measures. Beyond it one warning is logged per
    boundary and direction; the same holds for the next three options."""
    gradient_error: float = Field(default=0.4, gt=0, le=1e9)
    """Largest error of accumulated gradients: the bias of what arrives, and the random part of its error as
    far as 8 messages leave it, both as a multiple of the mean gradient over tokens. Optimizers add up
    gradients, so an unbiased codec may have a relative error of 0.5 or 1."""
    residual: float = Field(default=100.0, gt=0, le=1e9)
    """Largest residual of error feedback, as a multiple of the message's norm, in two consecutive measured
    steps. A TopK that keeps up may reach 0.5 / density."""
    nonfinite: float = Field(default=0.0, ge=0, le=1)
    """Largest share of a step's messages that hold inf or nan, in two consecutive measured steps."""
    action: Literal["warn", "stop"] = "warn"
    """What happens beyond a limit. warn: one warning. stop: all ranks stop; but `residual` of
    gradients, and `nonfinite`, stop them only if the block gives these limits."""

    def is_due(self, steps: int) -> bool:
        """Return whether there is a check after so many steps since the warm-up."""
        return self.every > 0 and steps > 0 and (steps == FIRST_CHECK or steps % self.every == 0)


class Block(Options):
    """The block as the user wrote it, with defaults filled in."""

    enabled: Literal["required"] | bool = True
    """false: DeepSpeed is not changed, as if the key were absent. "required": an engine that cannot compress,
    such as one without a pipeline, is an error, not a warning. The environment variable DS_COMPRESS_REQUIRE=1
    does the same for every engine."""
    recipe: str | None = Field(default=None, json_schema_extra=recipes.as_schema)
    """Name of a recipe (`ds-compress list --recipes`); every other key of the block changes it. A codec or a
    feedback in the block replaces that of the recipe with all its options. "auto": the first three steps, or
    the last two of a longer warm-up, are measured uncompressed; then codecs are chosen for each boundary, and
    the depth."""
    quality: Quality | None = None
    """With recipe "auto": the error budget, which limits the errors of messages in each direction; null is
    "safe". lossless: messages arrive bit-identical. docs/auto.md lists the limits, and what each may cost."""
    forward: DirectionOptions = DirectionOptions()
    """Activations, from stage b to b+1."""
    backward: DirectionOptions = DirectionOptions()
    """Gradients, from stage b+1 to b."""
    boundaries: dict[Annotated[str, BeforeValidator(_number)], BoundaryOptions] = Field(
        {}, json_schema_extra={"propertyNames": {"pattern": f"^({NUMBER})$"}}
    )
    """Settings of single boundaries, by number: "0" is the cut between stages 0 and 1."""
    warmup_steps: Steps = 0
    """Optimizer steps at the start of training in which all messages are uncompressed."""
    warmup_epochs: int = Field(default=0, ge=0, le=10**6)
    """The same in passes over the `training_data` given to `deepspeed.initialize`, instead of steps."""
    policy: Any = Field(default="constant", json_schema_extra={"registry": "policy"})
    """Name of a policy, which changes settings during training, or an object with its name and options."""
    eval: Literal["compressed", "uncompressed", "both"] | None = None
    """How messages of eval_batch are sent after the warm-up; feedback is not used. null: uncompressed if
    activations have a feedback that sends changes (aqsgd, ef21), which mean nothing without it, else
    compressed. both: each batch is evaluated in both ways, which are logged as one line and two values;
    eval_batch returns what it returns with null."""
    min_numel: int = Field(default=4096, ge=0, le=2**40)
    """Tensors with fewer elements are sent uncompressed."""
    tensors: Literal["large"] | Annotated[list[TensorPosition], Field(min_length=1)] = "large"
    """Which float tensors of a message are compressed, in both directions. "large": those of at least
    min_numel elements that depend on parameters. A list of positions, such as [0, 2]: those, whatever their
    size. Positions count the float tensors alone; all other tensors, and masks, are sent uncompressed."""
    link: LinkOptions = LinkOptions()
    """How messages are sent, and how long one may take."""
    tied: DirectionOptions = DirectionOptions()
    """Gradients of a weight that several stages have, such as a tied embedding: how the stages exchange them
    in each step after the warm-up. With codec "none" DeepSpeed sums them in full: for an embedding more bytes
    than messages take, if a step has fewer tokens than the vocabulary. Codecs and feedbacks are those of
    `replicas`, but for "lowrank"; weights of fewer than 16,384 values stay exact."""
    replicas: ReplicasOptions | None = None
    """How gradients between data-parallel replicas are compressed; null: they are DeepSpeed's."""
    state_check_every: int = Field(default=100, ge=0, le=1_000_000_000)
    """Steps between two comparisons, by hash, of the state that both sides of a boundary mirror (ef21,
    aqsgd). If it differs, both start from zero and a warning is logged. 0: never."""
    guard: GuardOptions = GuardOptions()
    """Warns or stops when compression hurts."""
    monitor: MonitorOptions = MonitorOptions()
    """What is written to DeepSpeed's monitors: W&B, TensorBoard, CSV."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """How the residuals and buffers of feedbacks are saved beside DeepSpeed's checkpoints."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of every random choice, together with boundary, direction, step and micro-batch."""
