"""The quantizer of a paper as it defines it, to reproduce its results; `quantize` is better and faster."""

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.shapes import (
    clear_rows,
    group_shape,
    join,
    matrix_shape,
    row_bits,
    split,
    with_rows,
    zero_rows,
)
from ds_compress.kernels.numerics import as_divisor, saturate
from ds_compress.kernels.quantize.bits import pack, packed_size, unpack
from ds_compress.stability import Stability


@register("minmax")
class MinMax(Codec):
    """Uniform quantization between the minimum and the maximum of the tensor, as in arXiv 2401.07788.

    q = round((2^bits - 1) * (x - lo) / (hi - lo)), ties to even; decoded lo + (hi - lo) * q / (2^bits - 1).
    The paper leaves a constant tensor undefined; here it stays what it is. One bit a row keeps rows of zeros.
    """

    examples = ({"bits": 4}, {"bits": 8})

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, "tensor")
        codes = (groups, packed_size(size, self.options.bits)), torch.uint8
        return codes, ((groups, 2), torch.float32), *row_bits(self._rows(spec.shape))

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        values = split(x, "tensor").float()
        # which of two zeros a reduction meets first depends on the processor: + 0.0 makes both 0.0
        ends = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        low, high = (saturate(end + 0.0, 2.0**117) for end in ends)  # their products with codes are finite
        width = torch.where(high > low, high - low, 1)  # all codes of a constant tensor are 0
        codes = values.sub(low).mul_(self._top).div_(width).round_().clamp_(0, self._top).nan_to_num_(0)
        parts = pack(codes.to(torch.uint8), self.options.bits), torch.cat([low, high], dim=1)
        return with_rows(parts, zero_rows(x) if self._rows(x.shape) else None)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        packed, limits, *bits = parts
        low, high = limits.split(1, dim=1)
        values = unpack(packed, self.options.bits).float().mul_(high - low)
        values = values.div_(as_divisor(self._top, values)).add_(low)
        # `join` converts fp16 from fp32
        values = join(values.to(spec.dtype if spec.dtype == torch.bfloat16 else torch.float32), spec)
        return clear_rows(values, bits)

    @staticmethod
    def _rows(shape: tuple[int, ...]) -> int:
        """Return the rows whose zeros need a bit: a lone row of zeros is constant."""
        rows, width = matrix_shape(shape)
        return rows if rows > 1 and width else 0

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
