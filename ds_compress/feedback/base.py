"""Feedback: state that travels with training, wrapped round a codec.

A feedback is itself a codec that delegates to the one it wraps, so a channel treats both alike; what it
remembers lives in `ctx.memory`, which the boundary keeps and checkpoints. In evaluation every feedback is the
plain codec.

Two rules hold for all of them. What the sender remembers follows from what the receiver decodes, computed by
the receiver's own code. And a message that is not finite crosses visibly and leaves no trace: whether it is
finite is decided on the device, and where both sides keep state, from the decoded message, so both decide
alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, TensorSpec
from ds_compress.errors import CompressionError
from ds_compress.feedback.sample_ids import SampleIds
from ds_compress.registry import Named, Registry


class Feedback(Named, ABC):
    """A recipe for wrapping a codec."""

    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")  # it may be asked for
    mirrors: ClassVar[bool] = False  # True: both sides keep the same state, and each makes it for itself
    sample_ids: ClassVar[SampleIds | None] = None  # those it needs with every training message

    @abstractmethod
    def around(self, codec: Codec) -> Codec:
        """`codec` with this feedback.

        Raises:
            CompressionError: the two cannot work together.
        """

    def prepare(self) -> None:
        """Called on every rank before training: make what this machine has to have, a folder for instance.

        Raises:
            CompressionError: it cannot; the first words name the option.
        """


FEEDBACKS: Registry[Feedback] = Registry("feedback")


@FEEDBACKS.register("none")
class NoFeedback(Feedback):
    """The codec as it is: what it loses is lost."""

    def around(self, codec: Codec) -> Codec:
        return codec


class FeedbackCodec(Codec):
    """A codec with a feedback round it: in evaluation, and where a method is not overridden, the codec
    itself."""

    def __init__(self, feedback: Feedback, codec: Codec):
        """
        Raises:
            CompressionError: the sender cannot know what `codec` delivers.
        """
        super().__init__(codec.options)
        if codec.has_rest:
            raise CompressionError(f"{feedback.name!r} cannot follow codec {codec.name!r}; allowed: 'none'")
        if not codec.sender_decodes:
            raise CompressionError(
                f"{feedback.name!r} cannot follow codec {codec.name!r}: only the receiver can decode "
                "its messages; allowed: 'none'"
            )
        self.feedback = feedback
        self.codec = codec
        self.name = codec.name
        self.both_directions = codec.both_directions
        self.needs_warmup = codec.needs_warmup
        self.selects = codec.selects

    def __str__(self) -> str:
        return f"{self.codec} + {self.feedback}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.codec.settings, "feedback": self.feedback.settings}

    def kept(self, spec: TensorSpec) -> int:
        """How many entries of a tensor of `spec` cross, where the codec selects."""
        return self.codec.kept(spec)

    def gain(self, spec: TensorSpec) -> Tensor | None:
        """What the receiver multiplies those entries by, where the codec selects."""
        return self.codec.gain(spec)

    def layout(self, spec: TensorSpec) -> Layout:
        return self.codec.layout(spec)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        return self.encode_training(x, ctx) if ctx.training else self.codec.encode(x, ctx)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        return self.decode_training(parts, spec, ctx) if ctx.training else self.codec.decode(parts, spec, ctx)

    @abstractmethod
    def encode_training(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """`encode` of a training message, which may read and replace entries of `ctx.memory`."""

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        """`decode` of a training message; overridden where the receiver has state too."""
        return self.codec.decode(parts, spec, ctx)

    def rest(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Layout:
        return self.codec.rest(parts, spec)

    def restored(self, memory: MutableMapping[str, Tensor]) -> None:
        self.codec.restored(memory)

    def prefetch(self, ids: Tensor, memory: MutableMapping[str, Tensor]) -> None:
        self.codec.prefetch(ids, memory)

    def observe(self, x: Tensor, ctx: Context) -> None:
        self.codec.observe(x, ctx)

    def end_step(self, memory: MutableMapping[str, Tensor], average: Callable[[Tensor], Tensor]) -> None:
        self.codec.end_step(memory, average)

    def paired(self, forward: Codec) -> Codec:
        return self.feedback.around(self.codec.paired(forward))

    def forward_partner(self) -> Codec | None:
        return self.codec.forward_partner()
