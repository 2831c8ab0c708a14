"""Quantizers of papers as they define them, to reproduce their results; `quantize` is better and faster."""

import math

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Stability, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.shapes import group_shape, join, round_up, split
from ds_compress.kernels.numerics import as_divisor, saturate
from ds_compress.kernels.quantize.bits import pack, packed_size, unpack


class _Bits(CodecOptions):
    bits: int = Field(4, ge=1, le=8)
    """Bits of one code."""


@register("minmax")
class MinMax(Codec):
    """Uniform quantization between the minimum and the maximum of the tensor, as in arXiv 2401.07788.

    q = round((2^bits - 1) * (x - lo) / (hi - lo)), ties to even; decoded lo + (hi - lo) * q / (2^bits - 1).
    The paper leaves a constant tensor undefined; here it stays what it is.
    """

    examples = ({"bits": 4}, {"bits": 8})
    Options = _Bits

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, "tensor")
        return ((groups, packed_size(size, self.options.bits)), torch.uint8), ((groups, 2), torch.float32)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        values = split(x, "tensor").float()
        # which of two zeros a reduction meets first depends on the processor: + 0.0 makes both 0.0
        ends = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        low, high = (saturate(end + 0.0, 2.0**117) for end in ends)  # their products with codes are finite
        width = torch.where(high > low, high - low, 1)  # all codes of a constant tensor are 0
        codes = values.sub(low).mul_(self._top).div_(width).round_().clamp_(0, self._top).nan_to_num_(0)
        return pack(codes.to(torch.uint8), self.options.bits), torch.cat([low, high], dim=1)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, limits = parts
        low, high = limits.split(1, dim=1)
        values = unpack(packed, self.options.bits).float().mul_(high - low)
        values = values.div_(as_divisor(self._top, values)).add_(low)
        # `join` converts fp16 from fp32
        return join(values.to(spec.dtype if spec.dtype == torch.bfloat16 else torch.float32), spec)

    def error_bound(self, spec: TensorSpec) -> float:
        return bounds.grid(spec.numel, self._top)

    def stability(self, spec: TensorSpec) -> Stability:
        return Stability(1 / self._top, norm="max")

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        reach = bounds.largest_normal(max(spec.numel, 1))
        return bounds.normal_on_grid(-reach, reach, self._top)

    @property
    def _top(self) -> int:
        """Return the largest code."""
        return int(2**self.options.bits - 1)


@register("acsgd")
class ACSGD(Codec):
    """Fixed point with one scale for each hidden channel, as in AC-SGD, the first version of AQ-SGD.

    arXiv 2206.01299, code DS3Lab/AC-SGD. With s the largest magnitude of a channel and f = bits - 1,
    q = round(x / s * 2^f) in -2^f .. 2^f - 1, decoded s * q / 2^f: there is one level fewer above 0 than
    below, so s itself is clipped. The original's fp16 scale and absolute epsilon lose small gradients; here s
    is fp32 and the epsilon relative.
    """

    examples = ({"bits": 4}, {"bits": 8})
    Options = _Bits

    def layout(self, spec: TensorSpec) -> Layout:
        channels, size = _channel_shape(spec)
        return ((channels, packed_size(size, self.options.bits)), torch.uint8), ((channels,), torch.float32)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        channels, size = _channel_shape(spec)
        if not channels:
            layout = self.layout(spec)
            return tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in layout)
        values, half = x.reshape(-1, channels).float(), self._half
        scale = saturate(values.abs().amax(0), 2.0**127)
        scale = torch.where(scale.isfinite(), scale, torch.nan)  # inf times a code can look finite in fp16
        divisor = torch.where(scale > 0, scale * (1 + 1e-6), 1)
        codes = values.div(divisor).mul_(half).round_().clamp_(-half, half - 1).add_(half)
        codes = codes.nan_to_num_(0).to(torch.uint8).t().contiguous()
        if size > codes.shape[1]:  # the last value fills up the row
            codes = torch.cat([codes, codes[:, -1:].expand(-1, size - codes.shape[1])], dim=1)
        return pack(codes, self.options.bits), scale

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, scale = parts
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        codes = unpack(packed, self.options.bits)[:, : spec.numel // len(scale)].t().contiguous()
        values = codes.float().sub_(self._half).div_(self._half).mul_(scale)
        return values.to(spec.dtype).view(spec.shape)

    def error_bound(self, spec: TensorSpec) -> float:
        # a step at most, and no more than the value itself, as 0 is on the grid
        return min(1.0, math.sqrt(_channel_shape(spec)[1]) / self._half)

    def stability(self, spec: TensorSpec) -> Stability:
        # 1 bit has no level above 0: positive values are never sent
        return Stability(1 / self._half, norm="max")

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        half, reach = self._half, bounds.largest_normal(_channel_shape(spec)[1])
        return bounds.normal_on_grid(-reach, reach * (half - 1) / half, 2 * half - 1)

    @property
    def _half(self) -> int:
        """Return the number of levels below 0."""
        return int(2 ** (self.options.bits - 1))


def _channel_shape(spec: TensorSpec) -> tuple[int, int]:
    """Return the channels, indices of the last dimension, and the values of each, padded to a multiple of
    8."""
    channels = spec.shape[-1] if spec.shape else 1
    return (channels, round_up(spec.numel // channels, 8)) if spec.numel else (0, 8)
