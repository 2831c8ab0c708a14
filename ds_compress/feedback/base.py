"""Feedback: state that wraps a codec and lives as long as training.

A wrapped codec is itself a codec, so a channel treats both alike. Its state lives in `ctx.memory`, which the
boundary keeps and checkpoints. In evaluation every feedback is the plain codec.

Two rules hold for all feedbacks. The sender's state follows from what the receiver decodes, computed by the
receiver's own code. And a message that is not finite arrives as such and does not change the state; with
codec `quantize` the same holds for each group of values. The device decides that; where both sides have
state, it decides from the decoded message, so both sides decide alike.
"""

import math
from abc import ABC, abstractmethod
from collections import ChainMap
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ds_compress.codec import TYPICAL, Codec, Context, Layout, Parts, TensorSpec
from ds_compress.codecs.mixins import CodecWrapper, VariableSizePayload
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.registry import Named, Registry
from ds_compress.stability import Stability


class Feedback(Named, ABC):
    """Options of a feedback, and the way it wraps a codec."""

    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")  # it may be asked for
    has_mirrored_state: ClassVar[bool] = False  # both sides keep the same state; each computes its own

    @property
    def sample_ids(self) -> SampleIds | None:
        """Return the sample ids that it needs with every training message, None for none."""
        return None

    def growth(self, stability: Stability) -> float:
        """Return the largest factor by which a message of zeros changes the norm of the state.

        From 1 up the state may grow without bound. 0: there is no state that could grow.
        """
        return 0.0

    def check_growth(self, codec: Codec) -> None:
        """Refuse `codec` if this state could grow without bound; codecs without `error_bound` pass.

        Raises:
            CompressionError: it may.
        """
        stability = codec.stability(TYPICAL)
        if 1 <= self.growth(stability) < math.inf:
            raise CompressionError(
                f"{self} cannot follow codec {codec}, which is no contraction ({stability}): its state could "
                f"grow without bound; allowed: 'none', or a codec that is a contraction{self.damping_hint}"
            )

    damping_hint: ClassVar[str] = ""
    """What else an error about growth allows."""

    @abstractmethod
    def wrap(self, codec: Codec) -> Codec:
        """Return `codec` with this feedback.

        Raises:
            CompressionError: the two cannot work together.
        """


FEEDBACKS: Registry[Feedback] = Registry("feedback", Feedback)
register_feedback = FEEDBACKS.register


@FEEDBACKS.register("none")
class NoFeedback(Feedback):
    """The plain codec: nothing makes up for its errors."""

    def wrap(self, codec: Codec) -> Codec:
        return codec


def encode_and_decode(
    codec: Codec, x: Tensor, ctx: Context, out: Parts | None = None
) -> tuple[Parts, Tensor]:
    """Encode `x`, into `out` if that is given, and decode it as the receiver will.

    The sender decodes with the receiver's context: without the entries that encoding leaves in it. They are
    kept apart until then: a copy of the memory, which may hold buffers of a whole data set, would take longer
    than the codec.

    Returns:
        The payload, and what the receiver decodes in x's dtype.
    """
    left: dict[str, Tensor] = {}
    receiver = replace(ctx, stash=dict(ctx.stash), memory=ChainMap({}, ctx.memory))
    parts = codec.encode_into(x, replace(ctx, memory=ChainMap(left, ctx.memory)), out)
    decoded = codec.decode(parts, TensorSpec.of(x), receiver)
    ctx.memory.update(left)
    return parts, decoded


class FeedbackCodec(Codec, CodecWrapper):
    """A codec wrapped by a feedback; in evaluation, and in methods not overridden, the codec itself.

    `mixins.layers` finds the optional abilities of the codec inside.
    """

    def __init__(self, feedback: Feedback, codec: Codec):
        """
        Raises:
            CompressionError: the sender cannot know what `codec` decodes to.
        """
        super().__init__(codec.options)
        if isinstance(codec, VariableSizePayload):
            raise CompressionError(f"{feedback.name!r} cannot follow codec {codec.name!r}; allowed: 'none'")
        self.feedback = feedback
        self.codec = codec
        self.name = codec.name
        self.keeps_zeros = codec.keeps_zeros

    def __str__(self) -> str:
        return f"{self.codec} + {self.feedback}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.codec.settings, "feedback": self.feedback.settings}

    def layout(self, spec: TensorSpec) -> Layout:
        return self.codec.layout(spec)

    def refuses(self, spec: TensorSpec) -> str:
        return self.codec.refuses(spec)

    def stability(self, spec: TensorSpec) -> Stability:
        return self.codec.stability(spec)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if ctx.training:
            return self.encode_training(x, ctx, out)
        return self.codec.encode_into(x, ctx, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        return self.decode_training(parts, spec, ctx) if ctx.training else self.codec.decode(parts, spec, ctx)

    @abstractmethod
    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        """Encode a training message; may read and replace entries of `ctx.memory`.

        Args:
            out: see `Codec.supports_out`.
        """

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        """Decode a training message; overridden if the receiver has state too."""
        return self.codec.decode(parts, spec, ctx)
