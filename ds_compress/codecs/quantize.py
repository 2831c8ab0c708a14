"""Codec quantize: quantization in groups of values."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, Stability, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixins import FusesFeedback
from ds_compress.codecs.shapes import (
    WIRE_DTYPES,
    GroupSize,
    clear_rows,
    group_shape,
    join,
    matrix_shape,
    pack_rows,
    row_bits,
    split,
    zero_rows,
)
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.numerics import is_readable
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.quantize.hadamard import cut_growth, key_of

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
        {"bits": 3, "hadamard": True},
        {"bits": 2, "hadamard": True},
        {"bits": 2, "hadamard": True, "rounding": "dither"},
    )

    class Options(CodecOptions):
        bits: int = Field(4, ge=1, le=8)
        """Bits of one code."""

        group_size: GroupSize = 128
        """Values that share a scale: so many in a row, or all of the tensor."""

        scheme: Literal["asymmetric", "symmetric"] = "asymmetric"
        """Range of a group's grid. asymmetric: from the smallest to the largest value; symmetric: around 0,
    which costs half the scale bits and keeps 0 exact."""

        scale_dtype: Literal["bf16", "fp32"] = "bf16"
        """Dtype in which scales are sent. bf16 rounds an offset by up to 1/128. If the values of a group are
        much closer to each other than to 0, use fp32: bf16 loses their differences."""

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
            if hadamard and (isinstance(size, str) or size & (size - 1)):
                raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
            return hadamard

        @model_validator(mode="after")
        def _two_levels(self) -> "Quantize.Options":
            if self.bits == 1 and self.scheme == "symmetric" and self.rounding == "nearest":
                raise CompressionError(
                    'scheme: \'symmetric\' of 1 bit was removed; use 2 bits, or "rounding": "dither"'
                )
            return self

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        scale = ((groups,), WIRE_DTYPES[self.options.scale_dtype])
        codes = (groups, packed_size(size, self.options.bits)), torch.uint8
        return codes, *[scale] * (1 if self._symmetric else 2), *row_bits(self._shared_rows(spec.shape))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        backend, run, grid, numel = kernels(x.device), self._run, self._grid(ctx.seed), x.numel()
        dither = ctx.key("dither") if self.unbiased else None
        rows = self._shared_rows(x.shape)
        own = out[:-1] if out and rows else out
        if run and numel and numel % run == 0:  # whole groups, contiguous in memory
            parts = backend.quantize(x, grid, dither, own, run)
        else:
            parts = backend.quantize(self._split(x), grid, dither, own)
        return (*parts, pack_rows(zero_rows(x), out[-1] if out else None)) if rows else parts

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
        grid, backend, zero = self._grid(ctx.seed), kernels(x.device), self._zero_rows(x, state[0])
        parts, new = backend.quantize_with_residual(
            values,
            tuple(stored),
            ctx.loss_scale,
            residual_decay,
            error_weight,
            grid,
            size,
            out[:-1] if out and zero is not None else out,
        )
        return self._with_rows(parts, zero, out), (
            self._lossless(self._join(new[0], x.shape), zero),
            *new[1:],
        )

    def encode_change(
        self, x: Tensor, state: Tensor, ctx: Context, out: Parts | None = None
    ) -> tuple[Parts, Tensor] | None:
        groups = self._in_groups(x, state)
        if groups is None:
            return None
        (values, stored), size = groups
        grid, backend, zero = self._grid(ctx.seed), kernels(x.device), self._zero_rows(x, state)
        own = out[:-1] if out and zero is not None else out
        parts, new = backend.quantize_change(values, stored, ctx.loss_scale, grid, size, own)
        return self._with_rows(parts, zero, out), self._lossless(self._join(new, x.shape), zero)

    def decode_change(
        self, parts: tuple[Tensor, ...], state: Tensor, spec: TensorSpec, ctx: Context
    ) -> tuple[Tensor, Tensor] | None:
        if not self._fuses(spec.dtype):
            return None
        grid, backend, run = self._grid(ctx.seed), kernels(state.device), self._run
        stored = state if run and spec.numel and spec.numel % run == 0 else self._split(state)
        rows = self._shared_rows(spec.shape)
        own = parts[:-1] if rows else parts
        both = backend.dequantize_change(own, stored, ctx.loss_scale, grid, spec.dtype)
        values, new = (self._join(each, spec.shape) for each in both)
        return (clear_rows(values, parts[-1]), clear_rows(new, parts[-1])) if rows else (values, new)

    def _zero_rows(self, x: Tensor, state: Tensor) -> Tensor | None:
        """Return bool [rows], those that are 0 in `x` and in `state`; None if the payload has no bits of
        rows."""
        if not self._shared_rows(x.shape):
            return None
        zero = zero_rows(x)
        return zero & zero_rows(state) if not is_readable(zero) or zero.any() else zero

    @staticmethod
    def _with_rows(parts: Parts, zero: Tensor | None, out: Parts | None) -> Parts:
        return parts if zero is None else (*parts, pack_rows(zero, out[-1] if out else None))

    @staticmethod
    def _lossless(state: Tensor, zero: Tensor | None) -> Tensor:
        """Return `state`, with 0 in the rows of which nothing is lost."""
        if zero is not None and (not is_readable(zero) or zero.any()):
            state.view(len(zero), -1).masked_fill_(zero[:, None], 0)
        return state

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
        backend, grid = kernels(parts[0].device), self._grid(ctx.seed)
        run, numel, dtype = self._run, spec.numel, spec.dtype
        dither = ctx.key("dither") if self._dithered else None
        rows = self._shared_rows(spec.shape)
        own = parts[:-1] if rows else parts
        if run and numel and numel % run == 0 and dtype in _MADE:
            values: Tensor = backend.dequantize(own, grid, dtype, spec.shape, dither)
        else:  # kernels do not decode to fp16: decode to fp32, and `join` converts
            wide = dtype if dtype in _MADE else torch.float32
            values = join(backend.dequantize(own, grid, wide, None, dither), spec)
        return clear_rows(values, parts[-1]) if rows else values

    @functools.cached_property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        """Return whether 0 is a level of every group's grid."""
        exact = self.options.rounding == "nearest" or (self.options.bits > 1 and not self._dithered)
        return self._symmetric and exact and not self.options.hadamard

    def keeps_rows(self, spec: TensorSpec) -> bool:
        return spec.numel > 0 and bool(self._run) and matrix_shape(spec.shape)[1] % self._run == 0

    @functools.cached_property
    def _shared_rows(self) -> Callable[[tuple[int, ...]], int]:
        """Return a cached function: the rows of a message, if groups cross them, so that they need bits."""

        @functools.lru_cache
        def shared_rows(shape: tuple[int, ...]) -> int:
            rows, width = matrix_shape(shape)
            whole = not width or (self._run and width % self._run == 0)
            return 0 if rows < 2 or whole or self.keeps_zeros else rows

        return shared_rows

    def error_bound(self, spec: TensorSpec) -> float:
        _, size = group_shape(spec, self.options.group_size)
        # rounding the scales makes a step up to 1 % larger;
        # two values determine the range of an asymmetric grid, one value that of a symmetric grid
        nearest = 1.02 * bounds.grid(2 * size if self._symmetric else size, self._grid().top)
        if self.options.rounding == "stochastic":
            return 2 * nearest
        has_zero = self._symmetric and not self._dithered
        return min(1.0, nearest) if has_zero else nearest

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        _, size = group_shape(spec, self.options.group_size)
        reach, top = bounds.largest_normal(size), self._grid().top
        if self._dithered:
            return 1.02 * 2 * reach / top / math.sqrt(12)
        return 1.02 * bounds.normal_on_grid(-reach, reach, top, self.options.rounding == "stochastic")

    def stability(self, spec: TensorSpec) -> Stability:
        # the error of a value is half a step, or a step; rounding the scales adds up to 2 %
        steps = 2 if self.options.rounding == "stochastic" else 1
        _, size = group_shape(spec, self.options.group_size)
        # the error of the zeros that fill up the last group is cut off
        rest = spec.numel % size if self.options.hadamard else 0
        factor = max(1.0, cut_growth(size, rest)) if rest else 1.0
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
            key = key_of(seed) if options.hadamard else 0
            rotation = WIRE_DTYPES[options.scale_dtype], options.hadamard, key
            return Grid(options.bits, self._symmetric, *rotation, self._dithered)

        return grid

    @functools.cached_property
    def _run(self) -> int:
        """Return the number of consecutive values that share a scale; 0: all of the tensor."""
        size = self.options.group_size
        return size if isinstance(size, int) else 0

    @functools.cached_property
    def _symmetric(self) -> bool:
        """Return whether grids are symmetric around 0."""
        return self.options.scheme == "symmetric"
