"""What the parts of the runtime see of what they watch, and what they ask for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ds_compress.codec import MessageId
from ds_compress.config import Config
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.transport.streams import Made

Watch = Callable[[Channel, Sequence[Tensor], MessageId], None]
"""Sees a message before it is encoded."""


class Trainer(Protocol):
    """The course of training: DeepSpeed's engine, or that of a simulated pipeline."""

    @property
    def global_steps(self) -> int:
        """Return the optimizer steps done."""

    @property
    def global_samples(self) -> int:
        """Return the samples that all replicas have seen."""

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step."""

    def get_lr(self) -> Sequence[float]:
        """Return the learning rates of the optimizer."""


class MessageSource(Protocol):
    """Ends of channels that messages pass; where an end `sends`, its `watch` sees them."""

    config: Config

    @property
    def ends(self) -> Sequence[Any]:
        """Ends of all channels that the stage sends or receives on."""


class StageView(Protocol):
    """The traffic of one stage (engine/stage.py)."""

    config: Config
    before: Boundary | None
    after: Boundary | None

    @property
    def ends(self) -> Sequence[SendingEnd | ReceivingEnd]:
        """Ends of all channels that the stage sends or receives on."""

    def on_codec_stream(self, boundary: Boundary, work: Callable[[], Made]) -> Made:
        """Run `work` on the stream where the codecs of `boundary` run; return its result."""


class Change(NamedTuple):
    """Settings that a part asks for, the same on every rank; they hold from the next step on."""

    boundaries: dict[str, Any]
    """As the block has them: {"0": {"forward": {"codec": "bf16"}}}."""

    report: Callable[[bool], None]
    """Called on rank 0 once the settings hold; its argument: whether any differs from those before."""
