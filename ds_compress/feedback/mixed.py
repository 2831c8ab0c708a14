"""EF-mixed: sends the input and the residual as two parts of a message."""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, Parts, TensorSpec
from ds_compress.codecs.mixins import FollowsForward, Selects
from ds_compress.errors import CompressionError
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.ef import ErrorFeedbackOptions
from ds_compress.feedback.state import State, StatefulFeedback
from ds_compress.kernels.numerics import as_divisor, can_keep, cast, is_finite, narrow, wide
from ds_compress.kernels.topk.selection import Selection
from ds_compress.stability import Stability


@FEEDBACKS.register("ef_mixed")
class MixedErrorFeedback(Feedback):
    """Input and residual compressed apart: m = C'(x) + C''(e), then e = e + x - m, in one density.

    Our reading of "EF-mixed" in Rudakov et al., arXiv 2401.07788, whose code does not contain it. A codec
    without a density stands for both C' and C'', at twice the bytes. Entries that both parts send are added.
    In evaluation the second part refines the first: C'(x) + C''(x - C'(x)), for top-k the whole density spent
    on x.
    """

    class Options(ErrorFeedbackOptions):
        split: float = Field(0.5, gt=0, lt=1)
        """Part of the density that goes to the input; the rest goes to the residual."""

    def growth(self, stability: Stability) -> float:
        return stability.constant

    def wrap(self, codec: Codec) -> Codec:
        if isinstance(codec, FollowsForward) and codec.forward_partner() is not None:
            raise CompressionError(
                f"'ef_mixed' cannot split the entries that {codec} takes over from forward; "
                "allowed: 'ef', 'ef21', 'loco'"
            )
        selects = isinstance(codec, Selects)
        return (SelectingMixedCodec if selects else MixedErrorFeedbackCodec)(self, codec)


class MixedErrorFeedbackCodec(FeedbackCodec, StatefulFeedback):
    """Sends the payload of C' followed by that of C''."""

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        options = feedback.options
        self.state = State(feedback.name, "sender", options, options.dtype)
        self.parts = _with_density(codec, options.split), _with_density(codec, 1 - options.split)

    def layout(self, spec: TensorSpec) -> Layout:
        return sum((part.layout(spec) for part in self.parts), ())

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if ctx.training:
            return self.encode_training(x, ctx, out)
        contexts, outputs = _contexts(ctx), self._outputs(x, out)
        first, sent = encode_and_decode(self.parts[0], x, contexts[0], outputs[0])
        rest = narrow(x.to(wide(x.dtype)) - sent, x)
        return first + self.parts[1].encode_into(rest, contexts[1], outputs[1])

    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        spec, outputs = TensorSpec.of(x), self._outputs(x, out)
        old = self.state.load(ctx, spec)
        finite = is_finite(x)
        residual = torch.where(finite, old * ctx.loss_scale, 0.0)
        contexts = _contexts(ctx)
        first, sent = encode_and_decode(self.parts[0], x, contexts[0], outputs[0])
        second, resent = encode_and_decode(self.parts[1], narrow(residual, x), contexts[1], outputs[1])
        _merge_selections(ctx, contexts)
        new = (x.to(old.dtype) + residual - _sum(sent, resent)) / as_divisor(ctx.loss_scale, old)
        self.state.save(ctx, spec, new, finite & can_keep(new))
        return first + second

    def _outputs(self, x: Tensor, out: Parts | None) -> list[Parts | None]:
        """Split the memory for a message of `x` into that of its two parts."""
        split = len(self.parts[0].layout(TensorSpec.of(x)))
        return [out and out[:split], out and out[split:]]

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        contexts = _contexts(ctx)
        split = len(self.parts[0].layout(spec))
        sent = self.parts[0].decode(parts[:split], spec, contexts[0])
        resent = self.parts[1].decode(parts[split:], spec, contexts[1])
        _merge_selections(ctx, contexts)
        return _sum(sent, resent)


class SelectingMixedCodec(MixedErrorFeedbackCodec, Selects):
    """The same for a codec that selects entries: those of both parts are kept."""

    def kept(self, spec: TensorSpec) -> int:
        return sum(part.kept(spec) for part in self.parts if isinstance(part, Selects))


def _with_density(codec: Codec, fraction: float) -> Codec:
    """Return `codec` with `fraction` of its density, or `codec` itself if it has none."""
    if not hasattr(codec.options, "density"):
        return codec
    return type(codec)(codec.options.model_copy(update={"density": fraction * codec.options.density}))


def _contexts(ctx: Context) -> tuple[Context, Context]:
    """Return a context for each part, with a stash and a seed of its own: the parts draw other entries."""
    # codecs that draw twice use the seed and the one after it
    return replace(ctx, stash=dict(ctx.stash)), replace(ctx, stash=dict(ctx.stash), seed=ctx.seed + 2)


def _merge_selections(ctx: Context, contexts: tuple[Context, Context]) -> None:
    """Store the entries of both parts for the backward message; an entry of both is there twice."""
    selections = [each.selection for each in contexts if each.selection is not None]
    if selections:
        ctx.selection = Selection.joined(selections)


def _sum(sent: Tensor, resent: Tensor) -> Tensor:
    dtype = wide(sent.dtype)
    return cast(sent.to(dtype) + resent.to(dtype), sent.dtype)
