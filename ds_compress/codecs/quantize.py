"""Codec quantize: quantization in groups of values."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.shapes import (
    GroupSize,
    clear_rows,
    group_shape,
    join,
    matrix_shape,
    row_bits,
    split,
    with_rows,
    zero_rows,
)
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.numerics import is_readable
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.quantize.hadamard import cut_growth, key_of
from ds_compress.stability import Stability

_MADE = (torch.float32, torch.bfloat16)
"""Dtypes that kernels decode to."""


@register("quantize")
class Quantize(Codec):
    """Quantizes to 1-8 bits, with one scale for each group of values.

    It also does the steps of a feedback in its own passes over the memory. Results equal those of the
    separate steps, except for values that are not finite: a group of values that holds one keeps its state,
    other groups do not. The methods for that return None and leave the state alone if there is no such pass
    for the message; this depends on options, shape and dtypes alone. Loss scales are those of `ctx`.
    """

    examples = (
        {"bits": 8},
        {"bits": 4},
        {"bits": 4, "hadamard": True},
        {"bits": 3, "hadamard": True},
        {"bits": 2, "hadamard": True},
        {"bits": 2, "hadamard": True, "rounding": "dither"},
    )

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

        group_size: GroupSize = 128
        """Values in a row that share a scale."""

        rounding: Literal["nearest", "stochastic", "dither"] = "nearest"
        """With stochastic and dither, the expected output equals the input. dither adds a
        random part of a step before rounding, which the receiver subtracts; both sides draw it. Its error is
        smaller than that of stochastic and does not depend on the values."""

        hadamard: bool = False
        """Rotate each group first, with signs drawn from the seed. This spreads outliers: at 4 bits, the
        error on a transformer's activations is 2 to 3 times smaller. Do not use it after a ReLU: a rotation
        turns its many zeros into other values."""

        @field_validator("hadamard")
        @classmethod
        def _power_of_two(cls, hadamard: bool, info: ValidationInfo) -> bool:
            size = info.data.get("group_size", 8)
            if hadamard and size & (size - 1):
                raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
            return hadamard

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        codes, scale = (groups, packed_size(size, self.options.bits)), ((groups,), torch.bfloat16)
        return (codes, torch.uint8), scale, scale, *row_bits(self._shared_rows(spec.shape))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        backend, grid = kernels(x.device), self._grid(ctx.seed)
        dither = ctx.key("dither") if self.unbiased else None
        groups = x if self._is_whole(x.numel()) else self._split(x)
        parts: Parts = backend.quantize(groups, grid, dither, out and out[:3], self.options.group_size)
        return with_rows(parts, zero_rows(x) if self._shared_rows(x.shape) else None, out)

    def encode_with_residual(
        self,
        x: Tensor,
        state: Parts,
        residual_decay: float,
        error_weight: float,
        ctx: Context,
        out: Parts | None = None,
    ) -> tuple[Parts, Parts] | None:
        """Encode x + ctx.loss_scale * state, or x alone where that sum is not finite.

        Args:
            state: what the feedback stores for x's shape: one tensor, or int8 codes and their scales; finite.
                It may be overwritten and returned.
            out: see `Codec.supports_out`.

        Returns:
            The payload and the next state, residual_decay * state + error_weight * lost / ctx.loss_scale.
            `lost` is the part of the sum that the receiver will not get.
        """
        groups = self._in_groups(x, *state)
        if groups is None:
            return None
        grid, backend, zero = self._grid(ctx.seed), kernels(x.device), self._zero_rows(x, state[0])
        parts, new = backend.quantize_with_residual(
            groups[0],
            groups[1:],
            ctx.loss_scale,
            residual_decay,
            error_weight,
            grid,
            self.options.group_size,
            out and out[:3],
        )
        new = self._lossless(self._join(new[0], x.shape), zero), *new[1:]
        return with_rows(parts, zero, out), new

    def encode_change(
        self, x: Tensor, state: Tensor, ctx: Context, out: Parts | None = None
    ) -> tuple[Parts, Tensor] | None:
        """Encode x - scale * state; `state` and `out` as for `encode_with_residual`.

        Returns:
            The payload and the next state, state + sent / scale. `sent` is what the receiver will get.
        """
        groups = self._in_groups(x, state)
        if groups is None:
            return None
        grid, backend, zero = self._grid(ctx.seed), kernels(x.device), self._zero_rows(x, state)
        size, own = self.options.group_size, out and out[:3]
        parts, new = backend.quantize_change(*groups, ctx.loss_scale, grid, size, own)
        return with_rows(parts, zero, out), self._lossless(self._join(new, x.shape), zero)

    def decode_change(
        self, parts: tuple[Tensor, ...], state: Tensor, spec: TensorSpec, ctx: Context
    ) -> tuple[Tensor, Tensor] | None:
        """Decode the `parts` that `encode_change` made.

        Returns:
            Scale * next state in the shape and dtype of `spec`, and the next state.
        """
        if not self._fuses(spec.dtype):
            return None
        grid, backend = self._grid(ctx.seed), kernels(state.device)
        stored = state if self._is_whole(spec.numel) else self._split(state)
        both = backend.dequantize_change(parts[:3], stored, ctx.loss_scale, grid, spec.dtype)
        values, new = (clear_rows(self._join(each, spec.shape), parts[3:]) for each in both)
        return values, new

    def _zero_rows(self, x: Tensor, state: Tensor) -> Tensor | None:
        """Return bool [rows], those that are 0 in `x` and in `state`; None if the payload has no bits of
        rows."""
        if not self._shared_rows(x.shape):
            return None
        zero = zero_rows(x)
        return zero & zero_rows(state) if not is_readable(zero) or zero.any() else zero

    @staticmethod
    def _lossless(state: Tensor, zero: Tensor | None) -> Tensor:
        """Return `state`, with 0 in the rows of which nothing is lost."""
        if zero is not None and (not is_readable(zero) or zero.any()):
            state.view(len(zero), -1).masked_fill_(zero[:, None], 0)
        return state

    def _in_groups(self, x: Tensor, *state: Tensor) -> Parts | None:
        """Arrange `x` and its state in groups for a kernel; None: no fused kernel supports these options."""
        if not self._fuses(x.dtype):
            return None
        if self._is_whole(x.numel()):
            return x, *state
        if len(state) > 1:  # the scales of the state refer to values in memory order
            return None
        return self._split(x), self._split(state[0])

    def _is_whole(self, numel: int) -> bool:
        """Return whether a message is whole groups, which lie in its memory one behind the other."""
        return numel % self.options.group_size == 0

    def _fuses(self, dtype: torch.dtype) -> bool:
        """Return whether kernels fuse quantization with feedback for these options."""
        return self.options.rounding == "nearest" and dtype in _MADE

    def _split(self, x: Tensor) -> Tensor:
        """Split a tensor into groups."""
        fill: Literal["last", "zeros"] = "zeros" if self.options.hadamard else "last"
        return split(x, self.options.group_size, fill)

    def _join(self, groups: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Join groups into a tensor of `shape`, without a copy if possible."""
        if groups.shape == shape:
            return groups
        return join(groups, TensorSpec(shape, groups.dtype, groups.device))

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        backend, grid, dtype = kernels(parts[0].device), self._grid(ctx.seed), spec.dtype
        dither = ctx.key("dither") if self._dithered else None
        own, bits = parts[:3], parts[3:]
        if dtype in _MADE and self._is_whole(spec.numel):
            values: Tensor = backend.dequantize(own, grid, dtype, spec.shape, dither)
        else:  # kernels do not decode to fp16: decode to fp32, and `join` converts
            wide = dtype if dtype in _MADE else torch.float32
            values = join(backend.dequantize(own, grid, wide, None, dither), spec)
        return clear_rows(values, bits)

    def keeps_rows(self, spec: TensorSpec) -> bool:
        return spec.numel > 0 and matrix_shape(spec.shape)[1] % self.options.group_size == 0

    @functools.cached_property
    def _shared_rows(self) -> Callable[[tuple[int, ...]], int]:
        """Return a cached function: the rows of a message, if groups cross them, so that they need bits."""

        @functools.lru_cache
        def shared_rows(shape: tuple[int, ...]) -> int:
            rows, width = matrix_shape(shape)
            return 0 if rows < 2 or width % self.options.group_size == 0 else rows

        return shared_rows

    def error_bound(self, spec: TensorSpec) -> float:
        # rounding the scales makes a step up to 1 % larger
        nearest = 1.02 * bounds.grid(self.options.group_size, self._grid().top)
        return 2 * nearest if self.options.rounding == "stochastic" else nearest

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        reach, top = bounds.largest_normal(self.options.group_size), self._grid().top
        if self._dithered:
            return 1.02 * 2 * reach / top / math.sqrt(12)
        return 1.02 * bounds.normal_on_grid(-reach, reach, top, self.options.rounding == "stochastic")

    def stability(self, spec: TensorSpec) -> Stability:
        # the error of a value is half a step, or a step; rounding the scales adds up to 2 %
        steps = 2 if self.options.rounding == "stochastic" else 1
        # the error of the zeros that fill up the last group is cut off
        rest = spec.numel % self.options.group_size if self.options.hadamard else 0
        factor = max(1.0, cut_growth(self.options.group_size, rest)) if rest else 1.0
        return Stability(factor * steps * 1.02 / self._grid().top, self.unbiased, "max")

    @functools.cached_property
    def unbiased(self) -> bool:
        return self.options.rounding != "nearest"

    @functools.cached_property
    def _dithered(self) -> bool:
        return self.options.rounding == "dither"

    @functools.cached_property
    def _grid(self) -> Callable[..., Grid]:
        """Return a cached function that makes the grid for the seed of a block; every message asks for it."""
        options = self.options

        @functools.lru_cache
        def grid(seed: int = 0) -> Grid:
            return Grid(options.bits, options.hadamard, key_of(seed) if options.hadamard else 0)

        return grid
