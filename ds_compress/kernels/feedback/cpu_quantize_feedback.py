"""Quantization of messages that follow a state: `reference` in C++ (quantize_feedback.cpp)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.feedback import compiled_quantize_feedback as compiled
from ds_compress.kernels.feedback import cpu as feedback
from ds_compress.kernels.feedback.quantize_feedback import Following
from ds_compress.kernels.quantize import compiled as quantize
from ds_compress.kernels.quantize import cpu as groups
from ds_compress.kernels.quantize.grid import Grid

_following = Following(groups, feedback)


def quantize_with_residual(
    values: Tensor,
    residual: tuple[Tensor, ...],
    scale: float,
    share: float,
    rest: float,
    grid: Grid,
    size: int,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """See `reference.quantize_with_residual`."""
    by: Any = compiled if _serves(values.numel(), size, values.dtype, residual, grid) else _following
    return by.quantize_with_residual(values, residual, scale, share, rest, grid, size, out)


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_change`."""
    by: Any = compiled if _serves(values.numel(), size, values.dtype, (state,), grid) else _following
    return by.quantize_change(values, state, scale, grid, size, out)


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.dequantize_change`."""
    size = parts[0].shape[1] * 8 // grid.bits
    by: Any = compiled if _serves(state.numel(), size, dtype, (state,), grid) else _following
    return by.dequantize_change(parts, state, scale, grid, dtype)


def _serves(numel: int, size: int, dtype: torch.dtype, state: Sequence[Tensor], grid: Grid) -> bool:
    known = dtype in quantize.FLOATS and size <= quantize.LARGEST_GROUP and not grid.is_mean
    return known and compiled.holds(state, size) and native.serves("quantize_feedback", numel)
