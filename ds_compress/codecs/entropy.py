"""Codec entropy: a uniform quantizer whose codes are entropy coded, at a constant size."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.entropy.format import COARSER, LARGEST_NUMEL, CodeLayout, frame_of

DITHERED_REACH = 2.0 ** (COARSER + 1)
"""Half of the coarsest step of a dithered message, as a multiple of its largest magnitude, at most."""


@register("entropy")
class Entropy(Codec):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    The size is constant, the error varies. `ds_compress.kernels.entropy.format` draws the packet.
    """

    examples = (
        *({"bits": bits} for bits in (4, 3.3, 2.5, 1)),
        {"bits": 2, "rounding": "dither"},
    )

    class Options(CodecOptions):
        bits: float = Field(2.5, ge=0.1, le=6)
        """Size of the packet in bits per value, all included. Tensors of a few dozen values take 2 bytes each
        and 32 for all."""

        rounding: Literal["nearest", "dither"] = "nearest"
        """dither: add a random part of a step to each value before it is rounded, and subtract it when it is
        decoded. Both sides draw it, so it is not sent. The error does not depend on the values, and its mean
        is 0: for gradients of few bits, where a systematic error costs more than a larger random one.
        nearest, where small values become 0, has the smaller error."""

    def layout(self, spec: TensorSpec) -> Layout:
        words = self._frame(spec).words if spec.numel else 0
        return (((words,), torch.int16),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        frame, dither = self._frame(TensorSpec.of(x)), self._dither(ctx)
        return (kernels(x.device).encode_entropy(x.detach().reshape(-1), frame, dither),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        (words,), frame = parts, self._frame(spec)
        values, valid = kernels(words.device).decode_entropy(words, frame, spec.dtype, self._dither(ctx))
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        return values.view(spec.shape)

    def _frame(self, spec: TensorSpec) -> CodeLayout:
        """Return the frame of a message of `spec`."""
        return frame_of(spec.numel, self.options.bits, self.unbiased)

    def _dither(self, ctx: Context) -> int | None:
        """Return the key of the dither, None for none."""
        return ctx.key("dither") if self.unbiased else None

    @property
    def unbiased(self) -> bool:
        return self.options.rounding == "dither"

    def error_bound(self, spec: TensorSpec) -> float:
        if self.unbiased:  # each value is half a step off at most, however coarse that is
            return DITHERED_REACH * math.sqrt(spec.numel)
        return 1.0  # values that need more bits than there are become zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = frame_of(max(spec.numel, 1), self.options.bits, self.unbiased)
        rate = 16 * frame.capacity / (frame.numel + 256)
        if self.unbiased:  # at low rates four classes say too little
            return 1.4 / math.sqrt(4**rate - 1) if rate >= 1 else max(1.0, rate**-1.6)
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}"
        return ""
