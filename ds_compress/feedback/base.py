"""Feedback: state that travels with training, wrapped round a codec.

A feedback is itself a codec that delegates to the one it wraps, so a channel treats both alike; what it
remembers lives in `ctx.memory`, which the boundary keeps and checkpoints. In evaluation every feedback is the
plain codec.

Two rules hold for all of them. What the sender remembers follows from what the receiver decodes, computed by
the receiver's own code. And what is not finite crosses visibly and leaves no trace: of a message, or of a
group of its values where a codec does both in one pass (`FusesFeedback`). That is decided on the device, and
where both sides keep state, from the decoded message, so both decide alike.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ds_compress.codec import TYPICAL, Codec, Context, Layout, Parts, Stability, TensorSpec
from ds_compress.codecs.mixins import CodecWrapper, ReceiverOnlyDecode, VariableSizePayload
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.registry import Named, Registry


class Feedback(Named, ABC):
    """A recipe for wrapping a codec."""

    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")  # it may be asked for
    mirrors: ClassVar[bool] = False  # True: both sides keep the same state, and each makes it for itself

    @property
    def sample_ids(self) -> SampleIds | None:
        """Those it needs with every training message."""
        return None

    def growth(self, stability: Stability) -> float:
        """How many times as large as it was, at most, what is kept is after a message of zeros; from 1 up it
        may grow for ever. 0: nothing that could."""
        return 0.0

    def check_growth(self, codec: Codec) -> None:
        """
        Raises:
            CompressionError: what is kept beside `codec` may grow for ever; nothing is known of codecs that
                declare no `error_bound`.
        """
        stability = codec.stability(TYPICAL)
        if 1 <= self.growth(stability) < math.inf:
            raise CompressionError(
                f"{self} cannot follow codec {codec}, which is no contraction ({stability}): what it keeps "
                f"could grow for ever; allowed: 'none', or a codec that is a contraction{self.damping_hint}"
            )

    damping_hint: ClassVar[str] = ""
    """What else is allowed where it could grow."""

    @abstractmethod
    def wrap(self, codec: Codec) -> Codec:
        """`codec` with this feedback.

        Raises:
            CompressionError: the two cannot work together.
        """

    def prepare(self) -> None:
        """Called on every rank before training: make what this machine has to have, a folder for instance.

        Raises:
            CompressionError: it cannot; the first words name the option.
        """


FEEDBACKS: Registry[Feedback] = Registry("feedback", Feedback)
register_feedback = FEEDBACKS.register


@FEEDBACKS.register("none")
class NoFeedback(Feedback):
    """The codec as it is: what it loses is lost."""

    def wrap(self, codec: Codec) -> Codec:
        return codec


def encode_and_decode(
    codec: Codec, x: Tensor, ctx: Context, out: Parts | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `codec` encodes `x` to, in `out` where there is some, and what the receiver will decode from it,
    in x's dtype.

    The sender decodes in a context as the receiver has it: without what encoding leaves behind.
    """
    receiver = replace(ctx, stash=dict(ctx.stash), memory=dict(ctx.memory))
    parts = codec.encode_into(x, ctx, out)
    return parts, codec.decode(parts, TensorSpec.of(x), receiver)


class FeedbackCodec(Codec, CodecWrapper):
    """A codec with a feedback round it: in evaluation, and where a method is not overridden, the codec
    itself.

    What the codec can do beyond that is found behind it, by `mixins.layers`.
    """

    def __init__(self, feedback: Feedback, codec: Codec):
        """
        Raises:
            CompressionError: the sender cannot know what `codec` delivers.
        """
        super().__init__(codec.options)
        if isinstance(codec, VariableSizePayload):
            raise CompressionError(f"{feedback.name!r} cannot follow codec {codec.name!r}; allowed: 'none'")
        if isinstance(codec, ReceiverOnlyDecode):
            raise CompressionError(
                f"{feedback.name!r} cannot follow codec {codec.name!r}: only the receiver can decode "
                "its messages; allowed: 'none'"
            )
        self.feedback = feedback
        self.codec = codec
        self.name = codec.name

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
        """`encode` of a training message, which may read and replace entries of `ctx.memory`. `out`: see
        `Codec.supports_out`."""

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        """`decode` of a training message; overridden where the receiver has state too."""
        return self.codec.decode(parts, spec, ctx)
