"""The fixed-point quantizer of AC-SGD, the first version of AQ-SGD (arXiv 2206.01299; code DS3Lab/AC-SGD)."""

import math

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, Stability, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.groups import group_shape
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.dispatch import kernels


@register("acsgd")
class ACSGD(Codec):
    """Fixed point with one scale for each hidden channel, as in AC-SGD.

    With s the largest magnitude of a channel and f = bits - 1, q = round(x / s * 2^f) in -2^f .. 2^f - 1,
    decoded s * q / 2^f: there is one level fewer above 0 than below, so s itself is clipped. The original's
    fp16 scale and absolute epsilon lose small gradients; here s is fp32 and the epsilon relative.
    """

    examples = ({"bits": 4}, {"bits": 8})

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

    def layout(self, spec: TensorSpec) -> Layout:
        channels, size = group_shape(spec, "channel")
        return ((channels, packed_size(size, self.options.bits)), torch.uint8), ((channels,), torch.float32)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        channels, size = group_shape(TensorSpec.of(x), "channel")
        if not channels:
            return tuple(
                torch.empty(shape, dtype=dtype, device=x.device)
                for shape, dtype in self.layout(TensorSpec.of(x))
            )
        return kernels(x.device).encode_channels(x.reshape(-1, channels), self.options.bits, size, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, scale = parts
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        rows, backend = spec.numel // len(scale), kernels(packed.device)
        return backend.decode_channels(packed, scale, self.options.bits, rows, spec.dtype).view(spec.shape)

    def error_bound(self, spec: TensorSpec) -> float:
        # a step at most, and no more than the value itself, as 0 is on the grid
        return min(1.0, math.sqrt(group_shape(spec, "channel")[1]) / 2 ** (self.options.bits - 1))

    def stability(self, spec: TensorSpec) -> Stability:
        # 1 bit has no level above 0: what is positive is never sent
        return Stability(2.0 ** (1 - self.options.bits), norm="max")

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        half, reach = 2 ** (self.options.bits - 1), bounds.largest_normal(group_shape(spec, "channel")[1])
        return bounds.normal_on_grid(-reach, reach * (half - 1) / half, 2 * half - 1)
