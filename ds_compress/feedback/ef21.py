"""EF21: messages are changes to a state that both sides keep."""

from typing import Literal

from torch import Tensor

from ds_compress.codec import Codec, Context, Stability, TensorSpec
from ds_compress.codecs.mixins import Observes
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.state import KeepsState, State, StateOptions
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.numerics import is_finite, wide


@FEEDBACKS.register("ef21")
class EF21(Feedback):
    """Compressed differences: m = C(x - A), then A = A + m on both sides; the receiver uses A.

    Richtarik et al., arXiv 2106.05203. Pays where successive messages are alike; what arrives is dense even
    when m is sparse. During warm-up A follows the uncompressed messages.
    """

    mirrors = True

    class Options(StateOptions):
        dtype: Literal["fp32", "bf16"] = "fp32"
        """How A is kept."""

    def growth(self, stability: Stability) -> float:
        # what a projection never sends stays as it is
        return stability.constant if stability.constant > 1 else 0.0

    def around(self, codec: Codec) -> Codec:
        return EF21Codec(self, codec)


class EF21Codec(FeedbackCodec, KeepsState, Observes):
    """Both sides hold A in units that the loss scale does not change, and add the same decoded message to
    it."""

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        self.state = State(feedback.name, "mirror", feedback.options, feedback.options.dtype)

    def encode_training(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        state = self.state.load(ctx, spec)
        change = kernels(x.device).changed(x, state, ctx.loss_scale)
        parts, sent = encode_and_decode(self.codec, change, ctx)
        self._advance(state, sent, spec, ctx)
        return parts

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        state = self.state.load(ctx, spec)
        change = self.codec.decode(parts, spec, ctx)
        return (self._advance(state, change, spec, ctx) * ctx.loss_scale).to(spec.dtype)

    def observe(self, x: Tensor, ctx: Context) -> None:
        spec = TensorSpec.of(x)
        new = x.to(wide(x.dtype)) / ctx.loss_scale
        self.state.save(ctx, spec, new, keep=~is_finite(new))

    def _advance(self, state: Tensor, change: Tensor, spec: TensorSpec, ctx: Context) -> Tensor:
        """The new state; not finite, and not kept, where the message was not."""
        new, finite = kernels(change.device).advanced(state, change, ctx.loss_scale)
        self.state.save(ctx, spec, new, keep=~finite)
        return new
