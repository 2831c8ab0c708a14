"""What the parts that watch and decide see of what they watch."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from ds_compress.message.endpoint import ReceivingEnd, SendingEnd
from ds_compress.transport.streams import Made


class StageView(Protocol):
    """The traffic of one stage (engine/stage.py)."""

    config: Config
    before: Boundary | None
    after: Boundary | None

    @property
    def ends(self) -> Sequence[SendingEnd | ReceivingEnd]:
        """Ends of all channels that the stage sends or receives on."""

    def in_lane(self, boundary: Boundary, work: Callable[[], Made]) -> Made:
        """Run `work` on the stream where the codecs of `boundary` run; return its result."""
