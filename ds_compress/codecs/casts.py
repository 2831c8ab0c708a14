"""Codecs that change the number format and nothing else."""

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.shapes import GroupSize, group_shape, join, split
from ds_compress.kernels.memory import copy_into
from ds_compress.kernels.numerics import as_divisor, cast, is_readable, saturate


@register("none")
class Identity(Codec):
    """Sends the tensor uncompressed."""

    keeps_zeros = True

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, spec.dtype),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        return parts[0]

    def keeps_rows(self, spec: TensorSpec) -> bool:
        return True

    def error_bound(self, spec: TensorSpec) -> float:
        return 0.0


@register("bf16")
class BFloat16(Codec):
    """16 bits: 8 of exponent, 8 of precision; the range of fp32.

    Values beyond the largest bf16 become that one; inf and nan stay.
    """

    keeps_zeros = True

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, torch.bfloat16),)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        return (cast(x, torch.bfloat16, None if out is None else out[0]),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if spec.dtype == torch.float16:
            return cast(parts[0], spec.dtype)
        return parts[0].type(spec.dtype)  # torch parses that faster than `to`

    def keeps_rows(self, spec: TensorSpec) -> bool:
        return True

    def error_bound(self, spec: TensorSpec) -> float:
        return bounds.rounding(torch.bfloat16, spec.dtype)


@register("fp16")
class Float16(Codec):
    """16 bits: 5 of exponent, 11 of precision, with one power-of-two scale per tensor.

    The scale lifts the largest magnitude to [2^14, 2^15), so small gradients do not underflow and large
    activations do not overflow; multiplying by a power of two costs no precision.
    """

    keeps_zeros = True

    def layout(self, spec: TensorSpec) -> Layout:
        return ((spec.shape, torch.float16), ((), torch.float32))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        x = x.float()
        largest = x.abs().amax() if x.numel() else x.new_ones(())
        _, exponent = torch.frexp(largest)
        # 2^127 is the largest power of two in fp32; inf, nan and 0 have no exponent worth using
        shift = (15 - exponent).clamp(max=127)
        scale = torch.where(largest.isfinite() & (largest > 0), torch.exp2(shift.float()), 1.0)
        # without the last digit the numbers from 2^127 on are not rounded up to 2^128
        scaled = x * torch.where(exponent > 127, scale * (1 - 2.0**-11), scale)
        return out[0].copy_(scaled) if out else scaled.half(), scale

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        values, scale = parts
        return (values.float() / scale).to(spec.dtype)

    def error_bound(self, spec: TensorSpec) -> float:
        # values far below the largest one lose what fp16 has no digits for
        return 2.0**-11 + math.sqrt(spec.numel) * 2.0**-26


_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

LARGEST_REACH = 2.0**127
"""Values beyond it are cut off: the product of a code and its scale may be rounded up."""


@register("fp8")
class Float8(Codec):
    """Eight-bit floats, scaled so that the largest magnitude of the tensor or group is the largest of the
    format."""

    examples = ({}, {"format": "e5m2"}, {"group_size": 128})
    keeps_zeros = True

    class Options(CodecOptions):
        format: Literal["e4m3", "e5m2"] = "e4m3"
        """e4m3 has 4 bits of precision down to 2^-15 of the largest magnitude, e5m2 3 bits down to 2^-30."""
        group_size: GroupSize | Literal["tensor"] = "tensor"
        """Values that share the fp32 scale: all of the tensor, or so many in a row."""

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        return ((groups, size), torch.uint8), ((groups,), torch.float32)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        values, largest = split(x, self.options.group_size).float(), torch.finfo(self._dtype).max
        scales = saturate(values.abs().amax(1), LARGEST_REACH) / as_divisor(largest, values)
        # e4m3 has no inf: the scale of a group that is not finite makes all of its values nan
        scaled = values / torch.where(scales != 0, scales, 1)[:, None]
        codes = scaled.clamp_(-largest, largest).to(self._dtype)
        return copy_into(out, (codes.view(torch.uint8), scales))

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        codes, scales = parts
        if is_readable(codes) and self.options.format == "e4m3":  # torch casts it in three times the time
            numbers = _numbers(self._dtype).index_select(0, codes.flatten().int()).view(codes.shape)
        else:
            numbers = codes.view(self._dtype).float()
        values = numbers.mul_(scales[:, None])
        # what `join` does to fp16 is done in fp32
        return join(values.bfloat16() if spec.dtype == torch.bfloat16 else values, spec)

    def error_bound(self, spec: TensorSpec) -> float:
        info = torch.finfo(self._dtype)
        subnormal = info.smallest_normal * info.eps / 2 / info.max  # of the largest value, from subnormals
        return info.eps / 2 + math.sqrt(group_shape(spec, self.options.group_size)[1]) * subnormal

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        return _FORMATS[self.options.format]


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """Return what each code of 8 bits stands for, fp32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
