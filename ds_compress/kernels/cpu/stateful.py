"""Quantization of messages that follow a state: `reference` in C++ (native/stateful.cpp)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.native import quantize
from ds_compress.kernels.native import stateful as compiled


def quantize_with_residual(
    groups: Tensor,
    residual: tuple[Tensor, ...],
    scale: float,
    share: float,
    rest: float,
    grid: Grid,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """See `reference.quantize_with_residual`."""
    if _serves(groups.shape, groups.dtype, grid) and compiled.holds(residual, groups.shape[1]):
        return compiled.quantize_with_residual(groups, residual, scale, share, rest, grid, out)
    return reference.quantize_with_residual(groups, residual, scale, share, rest, grid, out)


def quantize_change(
    groups: Tensor, state: Tensor, scale: float, grid: Grid, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_change`."""
    if _serves(groups.shape, groups.dtype, grid):
        return compiled.quantize_change(groups, state, scale, grid, out)
    return reference.quantize_change(groups, state, scale, grid, out)


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.dequantize_change`."""
    if _serves(state.shape, dtype, grid):
        return compiled.dequantize_change(parts, state, scale, grid, dtype)
    return reference.dequantize_change(parts, state, scale, grid, dtype)


def _serves(shape: Sequence[int], dtype: torch.dtype, grid: Grid) -> bool:
    n, size = shape
    known = dtype in quantize.FLOATS and size <= quantize.LARGEST_GROUP and not grid.is_mean
    return known and native.serves("stateful", n * size)
