"""Warn of messages that are left to DeepSpeed, which sends them uncompressed."""

import logging

from torch.distributed import Store

from ds_compress.engine.announced_tensors import Specs
from ds_compress.engine.stage import Stage
from ds_compress.message.channel import Channel

logger = logging.getLogger("ds_compress")


class LeftAlone:
    """Logs one warning for all ranks, by the first rank that has reason to."""

    def __init__(self, keys: Store):
        """Exchange through `keys` in common."""
        self._keys = keys
        self._is_logged = False

    def note(self, stage: Stage, channel: Channel, gradients: Specs) -> None:
        """Take note that a send instruction of `stage` sent no message on `channel`.

        Args:
            gradients: tensors like those it would have sent backward.

        Raises:
            CompressionError: compression is required.
        """
        number, forward = channel.boundary.number, channel.direction == "forward"
        why = stage.left_because.get(number, "its tensors are not announced")
        if number in stage.announced:
            why = "its instruction sends no tensor through deepspeed.runtime.pipe.p2p"
        # a boundary that is left to DeepSpeed is reported by the sender of activations
        if forward or (gradients and number in stage.announced):
            stage.config.refuse_if_required(f"{channel.place}: {why}")
            self._log(f"{channel.place}: left to DeepSpeed, uncompressed: {why}")

    def _log(self, line: str) -> None:
        if not self._is_logged and self._keys.add("warnings", 1) == 1:
            logger.warning(line)
        self._is_logged = True
