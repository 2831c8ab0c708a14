"""The quantizer of "Activations and Gradients Compression for Model-Parallel Training" (arXiv 2401.07788)."""

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, Stability, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.groups import group_shape, join, split
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.dispatch import kernels


@register("minmax")
class MinMax(Codec):
    """Uniform quantization between the minimum and the maximum of the tensor, as in arXiv 2401.07788.

    q = round((2^bits - 1) * (x - lo) / (hi - lo)), ties to even; decoded lo + (hi - lo) * q / (2^bits - 1).
    The paper leaves a constant tensor undefined; here it stays what it is.
    """

    examples = ({"bits": 4}, {"bits": 8})

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, "tensor")
        return ((groups, packed_size(size, self.options.bits)), torch.uint8), ((groups, 2), torch.float32)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        return kernels(x.device).encode_range(split(x, "tensor"), self.options.bits, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, limits = parts
        # what `join` does to fp16 is done in fp32
        wide = spec.dtype if spec.dtype == torch.bfloat16 else torch.float32
        return join(
            kernels(packed.device).decode_range(packed, limits, self.options.bits, wide), spec, "tensor"
        )

    def error_bound(self, spec: TensorSpec) -> float:
        return bounds.grid(spec.numel, 2**self.options.bits - 1)

    def stability(self, spec: TensorSpec) -> Stability:
        return Stability(1 / (2**self.options.bits - 1), norm="max")

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        reach = bounds.largest_normal(max(spec.numel, 1))
        return bounds.normal_on_grid(-reach, reach, 2**self.options.bits - 1)
