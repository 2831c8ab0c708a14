"""LoCo: error feedback with a damped residual in 8 bits."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, Context, Stability, TensorSpec
from ds_compress.feedback.base import FEEDBACKS, Feedback
from ds_compress.feedback.ef import ErrorFeedbackCodec
from ds_compress.feedback.state import StateOptions
from ds_compress.registry import Steps


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
