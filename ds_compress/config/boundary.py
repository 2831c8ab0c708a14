"""What serves one boundary."""

from dataclasses import dataclass
from typing import Any

from ds_compress.codec import Codec
from ds_compress.config.block import DIRECTIONS
from ds_compress.feedback import Feedback


@dataclass(frozen=True)
class BoundaryCodecs:
    """The codecs of one boundary, with their feedbacks round them, and the feedbacks alone."""

    forward: Codec
    backward: Codec
    feedbacks: dict[str, Feedback]  # by direction

    @property
    def settings(self) -> dict[str, Any]:
        return {direction: getattr(self, direction).settings for direction in DIRECTIONS}

    def replaced_by(self, other: "BoundaryCodecs") -> "BoundaryCodecs":
        """`other`, with this forward codec if both are set alike: it may keep much, and follows nobody."""
        if self.forward.settings != other.forward.settings:
            return other
        forward, backward = self.feedbacks["forward"], other.feedbacks["backward"]
        return BoundaryCodecs(self.forward, other.backward, {"forward": forward, "backward": backward})
