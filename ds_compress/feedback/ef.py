"""EF: what a message lost is added to the next one."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, Context, Parts, Stability, TensorSpec
from ds_compress.codecs.mixins import FusesFeedback, ReusesForwardIndices
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.state import KeepsState, State, StateOptions
from ds_compress.kernels.backends import kernels


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

    damping_hint = ", or a decay below 1"

    def growth(self, stability: Stability) -> float:
        return self.options.decay * stability.constant

    def wrap(self, codec: Codec) -> Codec:
        return ErrorFeedbackCodec(self, codec)


class ErrorFeedbackCodec(FeedbackCodec, KeepsState):
    """The sender's residual, in units that the loss scale does not change, is part of every message."""

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        self.state = State(feedback.name, "sender", feedback.options, feedback.options.dtype)
        self._follows = codec if isinstance(codec, ReusesForwardIndices) else None
        # what such a pass calls lost includes what a codec that follows another one could not carry
        self._fused = codec if isinstance(codec, FusesFeedback) and self._follows is None else None

    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        spec = TensorSpec.of(x)
        old = self.residual(ctx, spec)
        if self._fused is not None:
            found = self._fused.encode_with_residual(x, old, *self.shares, ctx, out)
            if found is not None:
                parts, new = found
                self.state.put(ctx, spec, new)
                return parts
        parts, new, finite = self._in_steps(x, old, spec, ctx, out)
        self.state.replace(ctx, spec, new, finite)
        return parts

    def residual(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        """What is added to a message of `spec`, as it is stored; to be written to."""
        return self.state.own(ctx, spec)

    @property
    def shares(self) -> tuple[float, float]:
        """Of the residual that was added and of what the message then lost, in the next residual."""
        return 0.0, self.feedback.options.decay

    def _in_steps(
        self,
        x: Tensor,
        stored: tuple[Tensor, ...],
        spec: TensorSpec,
        ctx: Context,
        out: Parts | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """What `FusesFeedback.encode_with_residual` returns, of which the whole message is one group; and
        whether it and the next state are finite, a bool of one element."""
        residual, backend = self.state.values(stored, spec), kernels(x.device)
        finite = backend.is_finite(x)
        total = backend.add_residual(x, residual, ctx.loss_scale, finite)
        parts, sent = encode_and_decode(self.codec, total, ctx, out)
        carried = self._follows.sent(spec, ctx) if self._follows is not None else None
        if carried is not None:  # what is not sent keeps its residual
            x, sent = (torch.where(carried, each, torch.zeros_like(each)) for each in (x, sent))
        new, kept = backend.update_residual(x, residual, sent, ctx.loss_scale, *self.shares)
        return parts, self.state.kept(new, spec), finite & kept
