"""Group-wise uniform quantization."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs.groups import GroupSize, group_shape, join, split
from ds_compress.kernels import reference
from ds_compress.kernels.bits import packed_size

SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@register("quantize")
class Quantize(Codec):
    """Uniform quantization to 1-8 bits, with one scale for each group of values.

    Costs bits + 32 / group_size bits per value with bf16 min-max scales, half as much on top with symmetric ones.
    Grids always cover their group (`kernels.grid`). bf16 keeps an offset to 1/128 of itself, so a group whose values
    lie much closer together than they lie to 0 keeps its details only with fp32 scales.
    """

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        group_size: GroupSize = 128
        scale: Literal["minmax", "symmetric"] = "minmax"
        scale_dtype: Literal["bf16", "fp32"] = "bf16"

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        scale = ((groups,), SCALE_DTYPES[self.options.scale_dtype])
        scales = (scale,) if self._symmetric else (scale, scale)
        return ((groups, packed_size(size, self.options.bits)), torch.uint8), *scales

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        groups = split(x, self.options.group_size)
        return reference.quantize(
            groups, self.options.bits, self._symmetric, SCALE_DTYPES[self.options.scale_dtype]
        )

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, step, *offset = parts
        groups = reference.dequantize(packed, step, offset[0] if offset else None, self.options.bits)
        return join(groups, spec, self.options.group_size)

    @property
    def _symmetric(self) -> bool:
        return self.options.scale == "symmetric"
