"""Group-wise uniform quantization."""

import functools
import math
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.groups import GroupSize, group_shape, join, split
from ds_compress.codecs.mixed import Mixed, map_size, reunite, separate
from ds_compress.codecs.mixins import EncodesWithError
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.dispatch import kernels

_SCALE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@register("quantize")
class Quantize(Codec, EncodesWithError):
    """Uniform quantization to 1-8 bits, with one scale for each group of values."""

    examples = (
        {"bits": 8},
        {"bits": 4},
        {"bits": 4, "hadamard": True},
        {"bits": 4, "scheme": "symmetric", "hadamard": True},
        {"bits": 3, "hadamard": True},
        {"bits": 2, "hadamard": True},
        {"bits": 4, "group_size": 32, "mixed": {"share": 0.8, "low_bits": 3}},
    )

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

        group_size: GroupSize = 128
        """Values that share a scale: so many in a row, all of the tensor, or each index of its last dimension
        (channel)."""

        scheme: Literal["asymmetric", "symmetric"] = "asymmetric"
        """asymmetric: a grid from the smallest to the largest value; symmetric: one around 0 that costs half
        the scale bits and keeps 0 exact."""

        scale_dtype: Literal["bf16", "fp32"] = "bf16"
        """How scales travel. bf16 keeps an offset to 1/128 of itself: a group whose values lie much closer
        together than they lie to 0 keeps its details with fp32 only."""

        rounding: Literal["nearest", "stochastic"] = "nearest"
        """stochastic makes the expected output equal the input."""

        hadamard: bool = False
        """Rotate each group first, which spreads outliers; at 4 bits 2 to 3 times less error on
        activations."""

        mixed: Mixed | None = None
        """Keep `bits` for the share of groups with the highest entropy, and give the others `low_bits`
        (TAH-Quant, arXiv 2506.01352, whose groups are 32 or 64 values)."""

        @field_validator("hadamard")
        @classmethod
        def _power_of_two(cls, hadamard: bool, info: ValidationInfo) -> bool:
            size = info.data.get("group_size", 8)
            if hadamard and (isinstance(size, str) or size & (size - 1)):
                raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
            return hadamard

        @field_validator("mixed")
        @classmethod
        def _fewer_bits(cls, value: Mixed | None, info: ValidationInfo) -> Mixed | None:
            if value and value.low_bits >= info.data.get("bits", 8):
                raise ValueError(f"needs low_bits below bits, which is {info.data['bits']}")
            if value and isinstance(info.data.get("group_size"), str):
                raise ValueError(f"needs a group_size in values, not {info.data['group_size']!r}")
            return value

    def layout(self, spec: TensorSpec) -> Layout:
        options = self.options
        groups, size = group_shape(spec, options.group_size)
        if options.mixed is None:
            return self._layout(groups, size, options.bits)
        high, low = options.mixed.counts(groups)
        tile_map = ((map_size(groups),), torch.uint8)
        return (
            tile_map,
            *self._layout(high, size, options.bits),
            *self._layout(low, size, options.mixed.low_bits),
        )

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        options = self.options
        generator = ctx.generator(x.device) if options.rounding == "stochastic" else None
        groups, grids, backend = split(x, options.group_size), self._grids, kernels(x.device)
        if options.mixed is None:
            return backend.quantize(groups, grids[options.bits], generator)
        tile_map, high, low = separate(groups, options.mixed.counts(len(groups))[0])
        high_parts = backend.quantize(high, grids[options.bits], generator)
        return tile_map, *high_parts, *backend.quantize(low, grids[options.mixed.low_bits], generator)

    def encode_with_error(
        self, x: Tensor, residual: Tensor, factor: Tensor, ctx: Context
    ) -> tuple[tuple[Tensor, ...], Tensor] | None:
        options = self.options
        if (
            options.mixed
            or options.rounding == "stochastic"
            or x.dtype not in (torch.float32, torch.bfloat16)
        ):
            return None
        groups, residual = (split(part, options.group_size) for part in (x, residual))
        grid = self._grids[options.bits]
        parts, error = kernels(x.device).quantize_with_error(groups, residual, factor, grid)
        return parts, join(error, TensorSpec(x.shape, torch.float32, x.device), options.group_size)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        options, grids, backend = self.options, self._grids, kernels(parts[0].device)
        # what `join` does to fp16 is done in fp32
        wide = spec.dtype if spec.dtype == torch.bfloat16 else torch.float32
        if options.mixed is None:
            groups = backend.dequantize(parts, grids[options.bits], wide)
        else:
            tile_map, parts = parts[0], parts[1:]
            half = len(parts) // 2
            high = backend.dequantize(parts[:half], grids[options.bits], wide)
            low = backend.dequantize(parts[half:], grids[options.mixed.low_bits], wide)
            groups = reunite(tile_map, high, low)
        return join(groups, spec, options.group_size)

    def error_bound(self, spec: TensorSpec) -> float:
        size, missing = self._padding(spec)
        worst = max(self._worst_error(bits, size, missing) for bits in self._widths)
        # in the rotated group, what was missing counts like the last value, which it repeats
        return worst * math.sqrt(1 + missing) if self.options.hadamard else worst

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        size, missing = self._padding(spec)
        error = max(self._normal_error(bits, size) for bits in self._widths)
        if not missing or not self.options.hadamard:
            return error
        # the rotation back spreads the error of the last group over what was missing too
        present, last = (size - missing) / size, (size - missing) / spec.numel
        return math.sqrt(error**2 + last * present * self.error_bound(spec) ** 2)

    @property
    def unbiased(self) -> bool:
        return self.options.rounding == "stochastic"

    @property
    def _widths(self) -> list[int]:
        mixed = self.options.mixed
        return [self.options.bits] + ([mixed.low_bits] if mixed else [])

    def _padding(self, spec: TensorSpec) -> tuple[int, int]:
        """Values per group, and how many of them the last group lacks (each group of a channel)."""
        groups, size = group_shape(spec, self.options.group_size)
        missing = groups * size - spec.numel
        return size, missing // max(groups, 1) if self.options.group_size == "channel" else missing

    def _worst_error(self, bits: int, size: int, missing: int) -> float:
        """Of one group, whatever its values; rounding the scales makes a step up to 1 % larger."""
        steps = self._grids[bits].top
        # two values make up the range of a grid from minimum to maximum, one that of a symmetric grid
        nearest = 1.02 * bounds.grid(2 * size if self._symmetric else size, steps)
        if self.options.rounding == "stochastic":
            return 2 * nearest
        if not self._symmetric:
            return nearest
        if bits > 1:
            return min(1.0, nearest)  # 0 is on the grid
        # every value becomes the mean magnitude, in which the last value counts for those that are missing
        return math.sqrt(size - missing) if missing else 1.0

    def _normal_error(self, bits: int, size: int) -> float:
        stochastic = self.options.rounding == "stochastic"
        mean_magnitude = bits == 1 and self._symmetric and not stochastic
        reach = math.sqrt(2 / math.pi) if mean_magnitude else bounds.largest_normal(size)
        return 1.02 * bounds.normal_on_grid(-reach, reach, self._grids[bits].top, stochastic)

    def _layout(self, groups: int, size: int, bits: int) -> Layout:
        scale = ((groups,), _SCALE_DTYPES[self.options.scale_dtype])
        scales = 1 if self._symmetric else 2
        return ((groups, packed_size(size, bits)), torch.uint8), *[scale] * scales

    @functools.cached_property
    def _symmetric(self) -> bool:
        return self.options.scheme == "symmetric"

    @functools.cached_property
    def _grids(self) -> dict[int, Grid]:
        """By the width of their codes."""
        scale_dtype, hadamard = _SCALE_DTYPES[self.options.scale_dtype], self.options.hadamard
        return {bits: Grid(bits, self._symmetric, scale_dtype, hadamard) for bits in self._widths}
