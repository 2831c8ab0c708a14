"""Quantization on the CPU: `reference` in C++ (native/quantize.cpp), equal to it bit for bit.

The reference writes the result of every operation to memory. Without a C++ compiler, and for what the
compiled passes do not know, it runs in blocks that fit in the cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.bits import packed_size

LARGEST_GROUP = 4096
"""Values of a group that a compiled pass can hold."""

BLOCK = 1 << 18  # values that the reference takes at a time: what it makes of them stays in the cache


def quantize(groups: Tensor, grid: Grid, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """See `reference.quantize`."""
    if generator is not None or groups.numel() < native.LONG:
        return reference.quantize(groups, grid, generator)
    if grid.is_mean or not _compiled(groups):  # the order of a sum is left to torch
        out = _allocate(groups, grid)
        for block, *parts in _blocks(groups, *out):
            for part, result in zip(parts, reference.quantize(block, grid)):
                part.copy_(result)
        return out
    values = groups if groups.dtype == torch.bfloat16 else groups.float()
    return _quantize(values, None, None, None, grid)


def quantize_with_error(
    groups: Tensor, residual: Tensor, factor: Tensor, grid: Grid
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_error`."""
    if groups.numel() < native.LONG or grid.is_mean or not _compiled(groups):
        return reference.quantize_with_error(groups, residual, factor, grid)
    error = torch.empty(groups.shape, dtype=torch.float32, device="cpu")
    return _quantize(groups, residual.contiguous(), factor, error, grid), error


def _quantize(
    values: Tensor, residual: Tensor | None, factor: Tensor | None, error: Tensor | None, grid: Grid
) -> tuple[Tensor, ...]:
    values = values.detach().contiguous()
    n, size = values.shape
    packed, step, *offset = _allocate(values, grid)
    native.call(
        "quantize",
        "quantize_groups",
        values,
        values.dtype == torch.bfloat16,
        residual,
        0.0 if factor is None else factor.item(),
        error,
        n,
        *_format(size, grid),
        packed,
        step,
        offset[0] if offset else None,
    )
    return packed, step, *offset


def _allocate(groups: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    n, size = groups.shape
    scales = [torch.empty(n, dtype=grid.scale_dtype, device="cpu") for _ in range(2 - grid.symmetric)]
    return torch.empty(n, packed_size(size, grid.bits), dtype=torch.uint8, device="cpu"), *scales


def dequantize(parts: Sequence[Tensor], grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `reference.dequantize`."""
    n, size = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    if n * size < native.LONG:
        return reference.dequantize(parts, grid, dtype)
    bf16 = dtype == torch.bfloat16
    values = torch.empty(n, size, dtype=torch.bfloat16 if bf16 else torch.float32, device="cpu")
    if not _compiled(values):
        for block, *its_parts in _blocks(values, *parts):
            block.copy_(reference.dequantize(its_parts, grid))
    else:
        packed, step, *offset = (part.contiguous() for part in parts)
        scales = step, offset[0] if offset else None
        native.call("quantize", "dequantize_groups", packed, *scales, n, *_format(size, grid), values, bf16)
    return values.to(dtype)


def _compiled(groups: Tensor) -> bool:
    return groups.shape[1] <= LARGEST_GROUP and native.serves("quantize", groups.device, groups.numel())


def _format(size: int, grid: Grid) -> tuple[float, ...]:
    return size, grid.bits, grid.symmetric, grid.hadamard, grid.scale_dtype == torch.float32, size**-0.5


def _blocks(groups: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`groups` and others of the same length, so many rows at a time as make a block of `groups`."""
    rows = max(1, BLOCK // groups.shape[1])
    return zip(*(tensor.split(rows) for tensor in (groups, *others)))
