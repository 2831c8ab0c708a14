"""Interfaces between the parts of the runtime and the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from ds_compress.transport.codec_stream import Made
from ds_compress.transport.p2p import ExchangeConnections


class Trainer(Protocol):
    """The progress of training, in DeepSpeed's engine or in a simulated pipeline."""

    @property
    def global_steps(self) -> int:
        """Return the number of optimizer steps."""

    def get_lr(self) -> Sequence[float]:
        """Return the learning rates of the optimizer."""


class Engine(Trainer, Protocol):
    """What the parts use of DeepSpeed's engine."""

    module: Any
    optimizer: Any
    grid: Any
    monitor: Any
    pipe_buffers: dict[str, list[Any]]
    device: torch.device
    micro_batches: int
    stage_id: int
    num_stages: int
    global_rank: int
    global_samples: int
    dynamic_shape: bool

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first stage."""

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last stage."""


class MessageSource(Protocol):
    """Ends of channels, with their `observers`."""

    @property
    def ends(self) -> Sequence[Any]:
        """Return the ends of all channels that the stage sends or receives on."""


class StageView(MessageSource, Protocol):
    """The traffic of one stage (engine/stage.py)."""

    config: Config
    before: Boundary | None
    after: Boundary | None
    connections: int
    """TCP connections of each channel and exchange."""
    exchange_connections: list[ExchangeConnections]
    """Of ranks that exchange packets of gradients."""

    def on_codec_stream(self, boundary: Boundary, work: Callable[..., Made], *args: Any) -> Made:
        """Run `work` with `args` on the stream where the codecs of `boundary` run; return its result."""


class Step(NamedTuple):
    """A training step that begins, or that is over with nothing in flight."""

    number: int
    """Counted from 1; 0 before the first."""
    engine: Engine
    stage: StageView
    is_judged: bool = False
    """Whether the guard checks its messages; for `begin_step`."""
    values: Mapping[str, Callable[[], Mapping[str, float]]] = {}
    """Measure gradients that are exchanged, by kind as in `metrics.GRADIENTS`: values by name, as in
    `metrics.EXCHANGE`; for `end_step`."""


class Change(NamedTuple):
    """A request for new settings from the next step on, the same on every rank."""

    boundaries: dict[str, Any]
    """As the block has them: {"0": {"forward": {"codec": "bf16"}}}; empty: the part has changed its own."""

    report: Callable[[], None] = lambda: None
    """Called on rank 0 once the settings hold."""


class RuntimePart:
    """Watches training, and decides. Its methods do nothing; override what you need.

    Every rank calls each of them alike. A part may hold the stage, but neither the session nor, unless it
    exchanges gradients, the engine.
    """

    key = ""
    """Name of its state in checkpoints, a field of `checkpoint.file.SessionState`; empty: it has none."""

    def begin_step(self, step: Step) -> None:
        """Prepare for a training step."""

    def end_step(self, step: Step) -> Change | None:
        """Do what is due after a training step; return the settings that are wanted from the next one on."""
        return None

    def follow(self) -> None:
        """Use the settings that the config has by now."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types, the same on every rank."""
        return {}

    def own_state(self) -> dict[str, list[float]]:
        """Return what this rank alone has measured, for a checkpoint: numbers by boundary, or by boundary and
        direction as in "0/forward"."""
        return {}

    def resume(self, step: Step, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> Change | None:
        """Continue from a checkpoint, or begin anew; return the settings that are wanted from then on.

        Args:
            step: the last one.
            state: what `state` returned; empty: there is none.
            own: what all parts of this rank had in `own_state`.

        Raises:
            CompressionError: the state does not fit.
        """
        return None
