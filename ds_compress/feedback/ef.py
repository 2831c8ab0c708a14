"""EF: what a message lost is added to the next one."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, Context, Stability, TensorSpec
from ds_compress.codecs.mixins import EncodesWithError, Follows
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.state import KeepsState, State, StateOptions
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.numerics import narrow


class ErrorFeedbackOptions(StateOptions):
    dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """How the residual is kept; int8 has a scale for each 128 values."""


@FEEDBACKS.register("ef")
class ErrorFeedback(Feedback):
    """Error feedback: m = C(x + e), then e = decay (x + e - m); the sender keeps e.

    Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847; at stage boundaries Rudakov et al.,
    arXiv 2401.07788, whose one buffer per boundary and direction is `scope: "boundary"`. The sum of the
    messages is the sum of the inputs but for the residual. e stays zero during warm-up. Where
    `indices: "reuse"` leaves entries out, they are not counted as lost.
    """

    class Options(ErrorFeedbackOptions):
        decay: float = Field(1.0, gt=0, le=1)
        """Part of the residual that goes into the next one. Below 1 the sums no longer agree, but it stays
        below decay / (1 - decay) times the largest message beside any codec that makes nothing larger; 0.5 to
        0.9 for randomk, whose plain residual grows to 1 / density times the message."""

    damped = ", or a decay below 1"

    def growth(self, stability: Stability) -> float:
        return self.options.decay * stability.constant

    def around(self, codec: Codec) -> Codec:
        return ErrorFeedbackCodec(self, codec)


class ErrorFeedbackCodec(FeedbackCodec, KeepsState):
    """The sender's residual, in units that the loss scale does not change, is part of every message."""

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        self.state = State(feedback.name, "sender", feedback.options, feedback.options.dtype)
        self._follows = codec if isinstance(codec, Follows) else None

    def encode_training(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        old = self.residual(ctx, spec)
        finite = kernels(x.device).finite(x)
        parts, error = encode_with_error(self.codec, x, old, finite * ctx.loss_scale, ctx)
        sent = self._follows.sent(spec, ctx) if self._follows is not None else None
        if sent is not None:  # what is not sent keeps its residual
            error = torch.where(sent, error, old * ctx.loss_scale)
        new = self.updated(old, error if ctx.loss_scale == 1 else error / ctx.loss_scale)
        self.state.save(ctx, spec, new, keep=~(finite & kernels(x.device).finite(new)))
        return parts

    def residual(self, ctx: Context, spec: TensorSpec) -> Tensor:
        """What is added to a message of `spec`."""
        return self.state.load(ctx, spec)

    def updated(self, residual: Tensor, error: Tensor) -> Tensor:
        """The next residual, from the one that was added and from what the message then lost."""
        decay = self.feedback.options.decay
        return error if decay == 1 else decay * error


def encode_with_error(
    codec: Codec, x: Tensor, residual: Tensor, factor: Tensor, ctx: Context
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `codec` encodes x + factor * residual to, and what of that sum the receiver will not get; see
    `EncodesWithError`, which does it in one pass where it can."""
    found = codec.encode_with_error(x, residual, factor, ctx) if isinstance(codec, EncodesWithError) else None
    if found is not None:
        return found
    total = x.to(residual.dtype) + residual * factor
    parts, sent = encode_and_decode(codec, narrow(total, x), ctx)
    return parts, total - sent
