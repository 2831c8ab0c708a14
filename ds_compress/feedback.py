"""Feedback: state that travels with training, wrapped round a codec.

A feedback is itself a codec that delegates to the one it wraps, so a channel treats both alike; what it remembers
lives in `ctx.memory`, which the boundary keeps and checkpoints.
"""

from abc import ABC, abstractmethod

from ds_compress.codec import Codec
from ds_compress.registry import Named, Registry


class Feedback(Named, ABC):
    """A recipe for wrapping a codec."""

    @abstractmethod
    def around(self, codec: Codec) -> Codec:
        """`codec` with this feedback."""


FEEDBACKS: Registry[Feedback] = Registry("feedback")


@FEEDBACKS.register("none")
class NoFeedback(Feedback):
    """The codec as it is: what it loses is lost."""

    def around(self, codec: Codec) -> Codec:
        return codec
