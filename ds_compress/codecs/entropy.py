"""A uniform quantizer whose codes are entropy coded, at a constant size."""

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.errors import CompressionError
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import LARGEST_NUMEL, frame_of


@register("entropy")
class Entropy(Codec):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    The size is constant, the error is what varies. `ds_compress.kernels.entropy` draws the packet.
    """

    examples = ({"bits": 4}, {"bits": 3.3}, {"bits": 2.5}, {"bits": 1})

    class Options(CodecOptions):
        bits: float = Field(2.5, ge=0.1, le=6)
        """Size of the packet in bits per value, all included. Tensors of a few dozen values take 2 bytes each
        and 32 for all."""

    def layout(self, spec: TensorSpec) -> Layout:
        words = frame_of(spec.numel, self.options.bits).words if spec.numel else 0
        return (((words,), torch.int16),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        frame = frame_of(x.numel(), self.options.bits)
        return (kernels(x.device).encode_entropy(x.detach().reshape(-1), frame),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        frame = frame_of(spec.numel, self.options.bits)
        values, valid = kernels(parts[0].device).decode_entropy(parts[0], frame, spec.dtype)
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        return values.view(spec.shape)

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0  # of values that no coder can tell in so few bits: zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = frame_of(max(spec.numel, 1), self.options.bits)
        rate = 16 * frame.room / (frame.numel + 256)
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}"
        return ""
