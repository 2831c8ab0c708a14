"""EF21: messages are changes to a state that both sides keep."""

from typing import Literal

from torch import Tensor

from ds_compress.codec import Codec, Context, Parts, TensorSpec
from ds_compress.codecs.mixins import ObservesWarmup
from ds_compress.codecs.quantize import Quantize
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.state import State, StatefulFeedback, StateOptions
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.feedback.reference import update_state
from ds_compress.kernels.numerics import as_divisor, can_keep, cast, wide
from ds_compress.stability import Stability


@FEEDBACKS.register("ef21")
class EF21(Feedback):
    """Compressed differences: m = C(x - A), then A = A + m on both sides; the receiver uses A.

    Richtarik et al., arXiv 2106.05203. Pays where successive messages are alike; what arrives is dense even
    when m is sparse. During warm-up A follows the uncompressed messages.
    """

    has_mirrored_state = True

    class Options(StateOptions):
        dtype: Literal["fp32", "bf16"] = "fp32"
        """Dtype of the stored A."""

    def growth(self, stability: Stability) -> float:
        # the part that a projection never sends stays constant
        return stability.constant if stability.constant > 1 else 0.0

    def wrap(self, codec: Codec) -> Codec:
        return EF21Codec(self, codec)


class EF21Codec(FeedbackCodec, StatefulFeedback, ObservesWarmup):
    """Adds the same decoded message to A on both sides; A is stored with the loss scale taken out.

    A message that is not finite leaves A as it was.
    """

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        self.state = State(feedback.name, "mirror", feedback.options, feedback.options.dtype)
        self._fused = codec if isinstance(codec, Quantize) else None

    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        spec = TensorSpec.of(x)
        if self._fused is not None:
            (stored,) = self.state.stored_for_writing(ctx, spec)
            found = self._fused.encode_change(x, stored, ctx, out)
            if found is not None:
                parts, new = found
                self.state.put(ctx, spec, (new,))
                return parts
        state = self.state.load(ctx, spec)
        change = kernels(x.device).delta(x, state, ctx.loss_scale)
        parts, sent = encode_and_decode(self.codec, change, ctx, out)
        self.state.save(ctx, spec, *update_state(state, sent, ctx.loss_scale))
        return parts

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if self._fused is not None:
            (stored,) = self.state.stored_for_writing(ctx, spec)
            found = self._fused.decode_change(parts, stored, spec, ctx)
            if found is not None:
                arrived, new = found
                self.state.put(ctx, spec, (new,))
                return arrived
        change, state = self.codec.decode(parts, spec, ctx), self.state.load(ctx, spec)
        new, keep = update_state(state, change, ctx.loss_scale)
        self.state.save(ctx, spec, new, keep)
        if ctx.loss_scale != 1 or new.dtype == spec.dtype:
            new = new * ctx.loss_scale  # a copy: what arrives may be changed, the state not
        return cast(new, spec.dtype)

    def observe(self, x: Tensor, ctx: Context) -> None:
        spec = TensorSpec.of(x)
        new = x.to(wide(x.dtype))
        new = new / as_divisor(ctx.loss_scale, new)
        self.state.save(ctx, spec, new, can_keep(new))
