"""Group-wise uniform quantization."""

from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs.groups import GroupSize, group_shape, join, split
from ds_compress.kernels import reference
from ds_compress.kernels.bits import packed_size

SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@register("quantize")
class Quantize(Codec):
    """Uniform quantization to 1-8 bits, with one scale for each group of values.

    bits: of one code.
    group_size: values that share a scale: a multiple of 8, "tensor", or "channel" for an index of the last dimension.
    scale: a grid from the smallest to the largest value ("minmax"), or one around 0 ("symmetric") that costs half the
        scale bits and keeps 0 exact.
    scale_dtype: "bf16" keeps an offset to 1/128 of itself: a group whose values lie much closer together than they
        lie to 0 keeps its details with "fp32" only.
    rounding: to "nearest", or "stochastic", which makes the expected output equal the input.
    hadamard: rotate each group first, which spreads outliers; at 4 bits 2 to 3 times less error on activations.
    """

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        group_size: GroupSize = 128
        scale: Literal["minmax", "symmetric"] = "minmax"
        scale_dtype: Literal["bf16", "fp32"] = "bf16"
        rounding: Literal["nearest", "stochastic"] = "nearest"
        hadamard: bool = False

        @field_validator("hadamard")
        @classmethod
        def _power_of_two(cls, hadamard: bool, info: ValidationInfo) -> bool:
            size = info.data.get("group_size", 8)
            if hadamard and (isinstance(size, str) or size & (size - 1)):
                raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
            return hadamard

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        codes = ((groups, packed_size(size, self.options.bits)), torch.uint8)
        scale = ((groups,), SCALE_DTYPES[self.options.scale_dtype])
        return (codes, scale) if self._symmetric else (codes, scale, scale)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        return reference.quantize(
            split(x, self.options.group_size),
            self.options.bits,
            self._symmetric,
            SCALE_DTYPES[self.options.scale_dtype],
            self.options.hadamard,
            ctx.generator(x.device) if self.options.rounding == "stochastic" else None,
        )

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, step, *offset = parts
        groups = reference.dequantize(
            packed, step, offset[0] if offset else None, self.options.bits, self.options.hadamard
        )
        return join(groups, spec, self.options.group_size)

    @property
    def _symmetric(self) -> bool:
        return self.options.scale == "symmetric"
