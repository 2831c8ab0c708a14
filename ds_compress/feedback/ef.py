"""Error feedback (EF), which adds what a message lost to the next one; LoCo, which damps the residual."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, Context, Parts, TensorSpec
from ds_compress.codecs.mixins import FollowsForward
from ds_compress.codecs.quantize import Quantize
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.state import State, StatefulFeedback, StateOptions
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.numerics import is_finite
from ds_compress.registry import Steps
from ds_compress.stability import Stability


class ErrorFeedbackOptions(StateOptions):
    dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Dtype of the stored residual; int8 has a scale for each 128 values."""


@FEEDBACKS.register("ef")
class ErrorFeedback(Feedback):
    """Error feedback: m = C(x + e), then e = decay (x + e - m); only the sender has e.

    Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847; at stage boundaries Rudakov et al.,
    arXiv 2401.07788, whose one buffer per boundary and direction is `scope: "boundary"`. The sum of the
    messages is the sum of the inputs but for the residual. e stays zero during warm-up. Where
    `indices: "reuse"` leaves entries out, they are not counted as lost.
    """

    class Options(ErrorFeedbackOptions):
        decay: float = Field(1.0, gt=0, le=1)
        """Part of the residual that is kept for the next message. 1: sums of messages arrive exactly, up to
        the current residual. Below 1 they do not, but the residual stays below decay / (1 - decay) times the
        largest message, with any codec that enlarges nothing. Use 0.5 to 0.9 with randomk: its residual
        would grow to 1 / density times the message."""

    damping_hint = ", or a decay below 1"

    def growth(self, stability: Stability) -> float:
        return self.options.decay * stability.constant

    def wrap(self, codec: Codec) -> Codec:
        return ErrorFeedbackCodec(self, codec)


class ErrorFeedbackCodec(FeedbackCodec, StatefulFeedback):
    """Adds the sender's residual to every message; the residual is stored with the loss scale taken out."""

    def __init__(self, feedback: Feedback, codec: Codec):
        super().__init__(feedback, codec)
        self.state = State(feedback.name, "sender", feedback.options, feedback.options.dtype)
        self._reuses = codec if isinstance(codec, FollowsForward) else None
        self._fused = codec if isinstance(codec, Quantize) else None

    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        spec = TensorSpec.of(x)
        stored = self.residual(ctx, spec)
        if self._fused is not None:
            found = self._fused.encode_with_residual(x, stored, *self.weights, ctx, out)
            if found is not None:
                parts, new = found
                self.state.put(ctx, spec, new)
                return parts
        # the same steps one by one, with the message as one group
        residual, backend = self.state.values(stored, spec), kernels(x.device)
        finite = is_finite(x)
        total = backend.add_residual(x, residual, ctx.loss_scale, finite)
        parts, sent = encode_and_decode(self.codec, total, ctx, out)
        sendable = self._reuses.sent(spec, ctx) if self._reuses is not None else None
        if sendable is not None:  # entries that cannot be sent keep their residual
            x, sent = (torch.where(sendable, each, torch.zeros_like(each)) for each in (x, sent))
        new, kept = backend.update_residual(x, residual, sent, ctx.loss_scale, *self.weights)
        self.state.save(ctx, spec, new, finite & kept)
        return parts

    def residual(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        """Return what is added to a message of `spec`, as it is stored; it may be overwritten."""
        return self.state.stored_for_writing(ctx, spec)

    @property
    def weights(self) -> tuple[float, float]:
        """Return the residual_decay and error_weight of the next residual; see
        `Quantize.encode_with_residual`."""
        return 0.0, self.feedback.options.decay


@FEEDBACKS.register("loco")
class LoCo(Feedback):
    """Damped error feedback: m = C(x + e), then e = beta e + (1 - beta) (x + e - m), kept in 8 bits.

    Xie et al., arXiv 2407.04480, with beta and the 8-bit store of DeepSpeed's ZeRO++. e estimates the usual
    error of a message instead of accumulating all of it, so it stays bounded if messages have little in
    common.
    """

    class Options(StateOptions):
        beta: float = Field(0.8, ge=0, lt=1)
        """Weight of the old residual in the next one."""
        reset_every: Steps = 1024
        """Start from zero again every so many optimizer steps; 0: never."""
        dtype: Literal["fp32", "bf16", "int8"] = "int8"
        """Dtype of the stored residual; int8 has a scale for each 128 values."""

    def growth(self, stability: Stability) -> float:
        return self.options.beta + (1 - self.options.beta) * stability.constant

    def wrap(self, codec: Codec) -> Codec:
        return LoCoCodec(self, codec)


class LoCoCodec(ErrorFeedbackCodec):
    """Updates the residual with `beta`, and resets it at step numbers that all ranks know."""

    def residual(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        options = self.feedback.options
        due = options.reset_every and ctx.step % options.reset_every == 0
        first = ctx.micro_batch == 0 or options.scope == "micro_batch"
        return self.state.zeros(spec) if due and first else super().residual(ctx, spec)

    @property
    def weights(self) -> tuple[float, float]:
        beta = self.feedback.options.beta
        return beta, 1 - beta
