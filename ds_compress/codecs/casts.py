"""Codecs that change the number format and nothing else."""

import math

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, Parts, TensorSpec, register
from ds_compress.codecs import bounds


@register("none")
class Identity(Codec):
    """Sends the tensor as it is."""

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, spec.dtype),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        return parts[0]

    def error_bound(self, spec: TensorSpec) -> float:
        return 0.0


class Cast(Codec):
    """Casts to `wire_dtype` and back; inf, nan and values beyond its range arrive non-finite."""

    wire_dtype: torch.dtype

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, self.wire_dtype),)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if out is None:
            return (x.to(self.wire_dtype),)
        out[0].copy_(x)
        return out

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        return parts[0].type(spec.dtype)  # torch parses that faster than `to`

    def error_bound(self, spec: TensorSpec) -> float:
        return bounds.rounding(self.wire_dtype, spec.dtype)


@register("bf16")
class BFloat16(Cast):
    """16 bits: 8 of exponent, 8 of precision; the range of fp32."""

    wire_dtype = torch.bfloat16


@register("fp16")
class Float16(Codec):
    """16 bits: 5 of exponent, 11 of precision, with one power-of-two scale per tensor.

    The scale lifts the largest magnitude to [2^14, 2^15), so small gradients do not underflow and large
    activations do not overflow; multiplying by a power of two costs no precision.
    """

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, torch.float16), ((), torch.float32))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        x = x.float()
        largest = x.abs().amax() if x.numel() else x.new_ones(())
        _, exponent = torch.frexp(largest)
        # 2^127 is the largest power of two in fp32; inf, nan and 0 have no exponent worth using
        shift = (15 - exponent).clamp(max=127)
        scale = torch.where(largest.isfinite() & (largest > 0), torch.exp2(shift.float()), 1.0)
        scaled = x * scale
        return out[0].copy_(scaled) if out else scaled.half(), scale

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        values, scale = parts
        return (values.float() / scale).to(spec.dtype)

    def error_bound(self, spec: TensorSpec) -> float:
        # values far below the largest one lose what fp16 has no digits for
        return 2.0**-11 + math.sqrt(spec.numel) * 2.0**-26
