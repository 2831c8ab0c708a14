"""Codec quantize: quantization in groups of values."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, Parts, Stability, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixed import map_size, reunite, separate
from ds_compress.codecs.mixins import FusesFeedback
from ds_compress.codecs.quantize_eigenbasis import EigenbasisQuantize
from ds_compress.codecs.quantize_options import QuantizeOptions
from ds_compress.codecs.shapes import WIRE_DTYPES, group_shape, join, split
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.quantize import gaussian
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.quantize.hadamard import key_of

_MADE = (torch.float32, torch.bfloat16)
"""Dtypes that kernels decode to."""


@register("quantize")
class Quantize(Codec, FusesFeedback):
    """Quantizes to 1-8 bits, with one scale for each group of values."""

    examples = (
        {"bits": 8},
        {"bits": 4},
        {"bits": 4, "hadamard": True},
        {"bits": 4, "scheme": "symmetric", "hadamard": True},
        {"bits": 4, "hadamard": True, "grid": "gaussian"},
        {"bits": 3, "hadamard": True},
        {"bits": 2, "hadamard": True},
        {"bits": 4, "group_size": 32, "mixed": {"share": 0.8, "low_bits": 3}},
        {"bits": 2, "rotate": "learned"},
        {"bits": 2, "hadamard": True, "rounding": "dither"},
    )

    Options = QuantizeOptions

    @classmethod
    def of(cls, options: QuantizeOptions) -> Codec:
        return EigenbasisQuantize(options) if options.rotate != "none" else cls(options)

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

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        options, backend, run = self.options, kernels(x.device), self._run
        dither = ctx.key("dither") if self.unbiased else None
        grid, numel = self._grid(options.bits, ctx.seed), x.numel()
        if run and numel and numel % run == 0:  # whole groups, contiguous in memory
            return backend.quantize(x, grid, dither, out, run)
        groups = self._split(x)
        if options.mixed is None:
            return backend.quantize(groups, grid, dither, out)
        tile_map, high, low = separate(groups, options.mixed.counts(len(groups))[0])
        low_grid = self._grid(options.mixed.low_bits, ctx.seed)
        low_dither = ctx.key("dither", "low_bits") if self.unbiased else None
        half = 2 if self._symmetric else 3  # tensors of each width
        return (
            tile_map,
            *backend.quantize(high, grid, dither, out and out[1 : 1 + half]),
            *backend.quantize(low, low_grid, low_dither, out and out[1 + half :]),
        )

    def encode_with_residual(
        self,
        x: Tensor,
        state: Parts,
        residual_decay: float,
        error_weight: float,
        ctx: Context,
        out: Parts | None = None,
    ) -> tuple[Parts, Parts] | None:
        groups = self._in_groups(x, *state)
        if groups is None:
            return None
        (values, *stored), size = groups
        grid, backend = self._grid(self.options.bits, ctx.seed), kernels(x.device)
        parts, new = backend.quantize_with_residual(
            values, tuple(stored), ctx.loss_scale, residual_decay, error_weight, grid, size, out
        )
        return parts, (self._join(new[0], x.shape), *new[1:])

    def encode_change(
        self, x: Tensor, state: Tensor, ctx: Context, out: Parts | None = None
    ) -> tuple[Parts, Tensor] | None:
        groups = self._in_groups(x, state)
        if groups is None:
            return None
        (values, stored), size = groups
        grid, backend = self._grid(self.options.bits, ctx.seed), kernels(x.device)
        parts, new = backend.quantize_change(values, stored, ctx.loss_scale, grid, size, out)
        return parts, self._join(new, x.shape)

    def decode_change(
        self, parts: tuple[Tensor, ...], state: Tensor, spec: TensorSpec, ctx: Context
    ) -> tuple[Tensor, Tensor] | None:
        if not self._fuses(spec.dtype):
            return None
        grid, backend, run = self._grid(self.options.bits, ctx.seed), kernels(state.device), self._run
        stored = state if run and spec.numel and spec.numel % run == 0 else self._split(state)
        values, new = backend.dequantize_change(parts, stored, ctx.loss_scale, grid, spec.dtype)
        return self._join(values, spec.shape), self._join(new, spec.shape)

    def _in_groups(self, x: Tensor, stored: Tensor, *scales: Tensor) -> tuple[list[Tensor], int] | None:
        """Arrange `x` and its state in groups for a kernel; return them with the group size, or None.

        None: no fused kernel supports these options.
        """
        run = self._run
        if not self._fuses(x.dtype):
            return None
        if run and x.numel() and x.numel() % run == 0:  # whole groups, contiguous in memory
            return [x, stored, *scales], run
        if scales:  # the scales of the state refer to values in memory order
            return None
        groups = self._split(x)
        return [groups, self._split(stored)], groups.shape[1]

    def _fuses(self, dtype: torch.dtype) -> bool:
        """Return whether kernels fuse quantization with feedback for these options."""
        return self.options.mixed is None and self.options.rounding == "nearest" and dtype in _MADE

    def _split(self, x: Tensor) -> Tensor:
        """Split a tensor into groups."""
        fill: Literal["last", "zeros"] = "zeros" if self.options.hadamard or self._gaussian else "last"
        return split(x, self.options.group_size, fill)

    def _join(self, groups: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Join groups into a tensor of `shape`, without a copy if possible."""
        if groups.shape == shape:
            return groups
        return join(groups, TensorSpec(shape, groups.dtype, groups.device))

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        options, backend = self.options, kernels(parts[0].device)
        grid = self._grid(options.bits, ctx.seed)
        run, numel, dtype = self._run, spec.numel, spec.dtype
        dither = ctx.key("dither") if self._dithered else None
        if run and numel and numel % run == 0 and dtype in _MADE:
            return backend.dequantize(parts, grid, dtype, spec.shape, dither)
        # kernels do not decode to fp16: decode to fp32, and `join` converts
        wide = dtype if dtype in _MADE else torch.float32
        if options.mixed is None:
            groups = backend.dequantize(parts, grid, wide, None, dither)
        else:
            tile_map, parts = parts[0], parts[1:]
            half = len(parts) // 2
            high = backend.dequantize(parts[:half], grid, wide, None, dither)
            low_grid = self._grid(options.mixed.low_bits, ctx.seed)
            low_dither = ctx.key("dither", "low_bits") if self._dithered else None
            low = backend.dequantize(parts[half:], low_grid, wide, None, low_dither)
            groups = reunite(tile_map, high, low)
        return join(groups, spec)

    def error_bound(self, spec: TensorSpec) -> float:
        size = self._group(spec)[0]
        return max(self._worst_error(bits, size) for bits in self._widths)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        size, missing = self._group(spec)
        error = max(self._normal_error(bits, size) for bits in self._widths)
        if not (missing and self._gaussian) or self.options.hadamard:
            return error
        # zeros in the last group reduce its scale, so it may lose all its values
        return math.sqrt(error**2 + (size - missing) / spec.numel)

    def stability(self, spec: TensorSpec) -> Stability:
        stochastic = self.options.rounding == "stochastic"
        if self._gaussian:
            return Stability(self.error_bound(spec))
        # the error of a value is half a step, or a step; rounding the scales adds up to 2 %
        steps = min(self._grid(bits).top for bits in self._widths)
        return Stability((2 if stochastic else 1) * 1.02 / steps, self.unbiased, "max")

    @functools.cached_property
    def unbiased(self) -> bool:
        return self.options.rounding != "nearest"

    @functools.cached_property
    def _dithered(self) -> bool:
        return self.options.rounding == "dither"

    @property
    def _widths(self) -> list[int]:
        """Return the bits per code of each width in use."""
        mixed = self.options.mixed
        return [self.options.bits] + ([mixed.low_bits] if mixed else [])

    def _group(self, spec: TensorSpec) -> tuple[int, int]:
        """Return the values per group and the number of padded values in the last group."""
        groups, size = group_shape(spec, self.options.group_size)
        return size, groups * size - spec.numel

    def _worst_error(self, bits: int, size: int) -> float:
        """Return the largest relative error of a group, for any values.

        Rounding the scales makes a step up to 1 % larger.
        """
        if self._gaussian:
            return gaussian.error_bound(bits, size)
        stochastic = self.options.rounding == "stochastic"
        steps = self._grid(bits).top
        # two values determine the range of an asymmetric grid, one value that of a symmetric grid
        nearest = 1.02 * bounds.grid(2 * size if self._symmetric else size, steps)
        if stochastic:
            return 2 * nearest
        has_zero = self._symmetric and not self._dithered
        return min(1.0, nearest) if has_zero else nearest

    def _normal_error(self, bits: int, size: int) -> float:
        """Return the relative error of a group of Gaussian values."""
        if self._gaussian:
            return 1.1 * gaussian.normal_error(bits)
        stochastic = self.options.rounding == "stochastic"
        reach = bounds.largest_normal(size)
        if self._dithered:
            return 1.02 * 2 * reach / self._grid(bits).top / math.sqrt(12)
        return 1.02 * bounds.normal_on_grid(-reach, reach, self._grid(bits).top, stochastic)

    def _layout(self, groups: int, size: int, bits: int) -> Layout:
        """Return the shapes and dtypes of the codes and scales of one width."""
        scale = ((groups,), WIRE_DTYPES[self.options.scale_dtype])
        scales = 1 if self._symmetric else 2
        return ((groups, packed_size(size, bits)), torch.uint8), *[scale] * scales

    @functools.cached_property
    def _grid(self) -> Callable[..., Grid]:
        """Return a cached function that makes the grid for a number of bits and the seed of a block.

        Every message asks for it.
        """
        scale_dtype, hadamard = WIRE_DTYPES[self.options.scale_dtype], self.options.hadamard

        @functools.lru_cache
        def grid(bits: int, seed: int = 0) -> Grid:
            key = key_of(seed) if hadamard else 0
            return Grid(bits, self._symmetric, scale_dtype, hadamard, key, self._gaussian, self._dithered)

        return grid

    @functools.cached_property
    def _run(self) -> int:
        """Return the number of consecutive values that share a scale and a width; 0 for other groupings."""
        size = self.options.group_size
        return size if self.options.mixed is None and isinstance(size, int) else 0

    @functools.cached_property
    def _gaussian(self) -> bool:
        """Return whether the grid has Gaussian levels."""
        options = self.options
        if options.grid is not None:
            return options.grid == "gaussian"
        says_more = "scheme" in options.model_fields_set or self.unbiased
        return options.hadamard and options.bits <= 3 and not says_more

    @functools.cached_property
    def _symmetric(self) -> bool:
        """Return whether grids are symmetric around 0."""
        return self._gaussian or self.options.scheme == "symmetric"
