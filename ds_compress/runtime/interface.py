"""Interfaces between the parts of the runtime and the engine."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.transport.streams import Made


class Trainer(Protocol):
    """The progress of training, in DeepSpeed's engine or in a simulated pipeline."""

    @property
    def global_steps(self) -> int:
        """Return the number of optimizer steps."""

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a step."""

    def get_lr(self) -> Sequence[float]:
        """Return the learning rates of the optimizer."""


class MessageSource(Protocol):
    """Ends of channels, with their `observers`."""

    @property
    def ends(self) -> Sequence[Any]:
        """Return the ends of all channels that the stage sends or receives on."""


class StageView(Protocol):
    """The traffic of one stage (engine/stage.py)."""

    config: Config
    before: Boundary | None
    after: Boundary | None

    @property
    def ends(self) -> Sequence[SendingEnd | ReceivingEnd]:
        """Return the ends of all channels that the stage sends or receives on."""

    def on_codec_stream(self, boundary: Boundary, work: Callable[[], Made]) -> Made:
        """Run `work` on the stream where the codecs of `boundary` run; return its result."""


class Change(NamedTuple):
    """A request for new settings from the next step on, the same on every rank."""

    boundaries: dict[str, Any]
    """As the block has them: {"0": {"forward": {"codec": "bf16"}}}."""

    report: Callable[[bool], None]
    """Called on rank 0 once the settings hold; its argument: whether any differs from those before."""
