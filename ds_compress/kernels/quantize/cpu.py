"""Quantization on the CPU: `reference` in C++ (quantize.cpp), equal to it bit for bit.

The reference writes the result of every operation to memory. Without a C++ compiler, and for what the
compiled passes do not know, it runs in blocks that fit in the cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.memory import delivered
from ds_compress.kernels.quantize import compiled
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.quantize.reference import with_error

BLOCK = 1 << 18  # values that the reference takes at a time: what it makes of them stays in the cache


def quantize(
    groups: Tensor,
    grid: Grid,
    dither: int | None = None,
    out: tuple[Tensor, ...] | None = None,
    size: int | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.quantize`."""
    numel, size = groups.numel(), size or groups.shape[1]
    is_mean = grid.is_mean and dither is None  # the order of a sum is left to torch
    if is_mean or size > compiled.LARGEST_GROUP or not native.serves("quantize", numel):
        if numel <= BLOCK or dither is not None:
            return reference.quantize(groups, grid, dither, out, size)
        blocks = [reference.quantize(block, grid) for (block,) in _blocks(groups.reshape(-1, size))]
        return delivered(tuple(map(torch.cat, zip(*blocks))), out)
    groups = groups.contiguous() if groups.dtype in compiled.FLOATS else groups.float().contiguous()
    return compiled.quantize(groups, size, grid, dither, out)


def dequantize(
    parts: Sequence[Tensor],
    grid: Grid,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """See `reference.dequantize`."""
    made = dtype if dtype in compiled.FLOATS else torch.float32
    way = compiled.back(parts[0].shape, grid, made, shape)
    if way is not None and native.serves("quantize", way.numel):
        values = torch.empty_like(way.template)
        way.call(values, *parts)
        return values if made is dtype else values.to(dtype)
    n, width = parts[0].shape
    size = width * 8 // grid.bits
    if n * size <= BLOCK:
        return reference.dequantize(parts, grid, dtype, shape)
    values = torch.empty(n, size, dtype=made, device="cpu")
    for block, *its_parts in _blocks(values, *parts):
        block.copy_(reference.dequantize(its_parts, grid))
    return values.to(dtype).view((n, size) if shape is None else shape)


quantize_with_error = with_error(quantize, dequantize)


def _blocks(groups: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`groups` and others of the same length, so many rows at a time as make a block of `groups`."""
    rows = max(1, BLOCK // groups.shape[1])
    return zip(*(tensor.split(rows) for tensor in (groups, *others)))
