"""Quantization of groups of values in PyTorch: the specification."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_compress.kernels.memory import Parts, copy_into
from ds_compress.kernels.quantize.bits import pack, unpack
from ds_compress.kernels.quantize.grid import Grid, from_codes, minmax_scales, to_codes
from ds_compress.kernels.quantize.hadamard import rotate, rotate_back

__all__ = ["dequantize", "quantize"]


def quantize(
    groups: Tensor, grid: Grid, dither: int | None = None, out: Parts | None = None, size: int | None = None
) -> Parts:
    """Quantize every row of `groups` on a grid of its own.

    Args:
        groups: [n, G] of any float dtype, G a multiple of 8, and a power of two for `grid.hadamard`.
        dither: 64 bits, the key of random rounding; None rounds to nearest.
        out: contiguous memory for the results; new memory if None.
        size: G, if `groups` have any other shape.

    Returns:
        Packed codes, uint8 [n, G * bits / 8]; step and offset, bf16 [n].
    """
    groups = groups if size is None else groups.reshape(-1, size)
    groups = rotate(groups.float(), grid.key) if grid.hadamard else groups.float()
    scales = minmax_scales(groups.amin(1), groups.amax(1), grid.top)
    return copy_into(out, (pack(to_codes(groups, scales, grid.top, dither), grid.bits), *scales))


def dequantize(
    parts: Sequence[Tensor],
    grid: Grid,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    dither: int | None = None,
) -> Tensor:
    """Return the values of `parts`, which `quantize` returned and which are contiguous.

    Args:
        dither: that of `quantize`, if its draws are to be subtracted.

    Returns:
        [n, G], or `shape` with as many entries, of `dtype`.
    """
    packed, *scales = parts
    codes = unpack(packed, grid.bits)
    groups = from_codes(codes, scales, dither)
    groups = rotate_back(groups, grid.key) if grid.hadamard else groups
    groups = groups.to(dtype)
    return groups if shape is None else groups.view(shape)
