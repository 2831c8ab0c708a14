"""Quantization of messages that follow a state: the kernels of groups.py, and a few steps of plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.numerics import is_finite
from ds_compress.kernels.reference.feedback import advanced, changed
from ds_compress.kernels.reference.stateful import kept_as, renewed, values_of
from ds_compress.kernels.triton.groups import dequantize, quantize, quantize_with_error


def quantize_with_residual(
    groups: Tensor, residual: Sequence[Tensor], scale: float, share: float, rest: float, grid: Grid
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_residual`."""
    held, finite = values_of(residual), is_finite(groups)
    parts, lost = quantize_with_error(groups, held, finite.float() * scale, grid)
    new = renewed(held, lost, scale, share, rest)
    return parts, kept_as(residual, new), finite & is_finite(new)


def quantize_change(
    groups: Tensor, state: Tensor, scale: float, grid: Grid
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """See `reference.quantize_change`."""
    parts = quantize(changed(groups, state, scale), grid)
    return parts, *advanced(state, dequantize(parts, grid, groups.dtype), scale)


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.dequantize_change`."""
    new, finite = advanced(state, dequantize(parts, grid, dtype), scale)
    return (new * scale).to(dtype), new, finite
