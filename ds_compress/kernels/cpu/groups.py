"""Quantization on the CPU: `reference` in C++ (native/quantize.cpp), equal to it bit for bit.

The reference writes the result of every operation to memory. Without a C++ compiler, and for what the
compiled passes do not know, it runs in blocks that fit in the cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.memory import delivered
from ds_compress.kernels.native import quantize as compiled

BLOCK = 1 << 18  # values that the reference takes at a time: what it makes of them stays in the cache


def quantize(
    groups: Tensor, grid: Grid, dither: int | None = None, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.quantize`."""
    n, size = groups.shape
    is_mean = grid.is_mean and dither is None  # the order of a sum is left to torch
    if is_mean or size > compiled.LARGEST_GROUP or not native.serves("quantize", n * size):
        if n * size <= BLOCK or dither is not None:
            return reference.quantize(groups, grid, dither, out)
        blocks = [reference.quantize(block, grid) for (block,) in _blocks(groups)]
        return delivered(tuple(map(torch.cat, zip(*blocks))), out)
    return compiled.quantize(groups if groups.dtype in compiled.FLOATS else groups.float(), grid, dither, out)


def dequantize(parts: Sequence[Tensor], grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `reference.dequantize`."""
    n, size = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    made = dtype if dtype in compiled.FLOATS else torch.float32
    if size <= compiled.LARGEST_GROUP and native.serves("quantize", n * size):
        values = compiled.dequantize(parts, grid, made)
        return values if made is dtype else values.to(dtype)
    if n * size <= BLOCK:
        return reference.dequantize(parts, grid, dtype)
    values = torch.empty(n, size, dtype=made, device="cpu")
    for block, *its_parts in _blocks(values, *parts):
        block.copy_(reference.dequantize(its_parts, grid))
    return values.to(dtype)


def _blocks(groups: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`groups` and others of the same length, so many rows at a time as make a block of `groups`."""
    rows = max(1, BLOCK // groups.shape[1])
    return zip(*(tensor.split(rows) for tensor in (groups, *others)))
