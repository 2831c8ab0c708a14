"""Quantization on the CPU: `reference` in C++ (native/quantize.cpp), equal to it bit for bit.

The reference writes the result of every operation to memory. Without a C++ compiler, and for what the
compiled passes do not know, it runs in blocks that fit in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.bits import packed_size

LARGEST_GROUP = 4096
"""Values of a group that a compiled pass can hold."""

BLOCK = 1 << 18  # values that the reference takes at a time: what it makes of them stays in the cache


def quantize(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.quantize`."""
    if generator is not None or groups.numel() < native.LONG:
        return reference.quantize(groups, bits, symmetric, scale_dtype, hadamard, generator)
    grid = (bits, symmetric, scale_dtype, hadamard)
    if _sums(bits, symmetric) or not _compiled(groups):
        out = _allocate(groups, bits, symmetric, scale_dtype)
        for block, *parts in _blocks(groups, *out):
            for part, result in zip(parts, reference.quantize(block, *grid)):
                part.copy_(result)
        return out
    values = groups if groups.dtype == torch.bfloat16 else groups.float()
    return _quantize(values, None, None, None, *grid)


def quantize_with_error(
    groups: Tensor,
    residual: Tensor,
    factor: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_error`."""
    grid = (bits, symmetric, scale_dtype, hadamard)
    if groups.numel() < native.LONG or _sums(bits, symmetric) or not _compiled(groups):
        return reference.quantize_with_error(groups, residual, factor, *grid)
    error = torch.empty(groups.shape, dtype=torch.float32, device="cpu")
    return _quantize(groups, residual.contiguous(), factor, error, *grid), error


def _quantize(
    values: Tensor,
    residual: Tensor | None,
    factor: Tensor | None,
    error: Tensor | None,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool,
) -> tuple[Tensor, ...]:
    values = values.detach().contiguous()
    n, size = values.shape
    packed, step, *offset = _allocate(values, bits, symmetric, scale_dtype)
    native.call(
        "quantize",
        "quantize_groups",
        values,
        values.dtype == torch.bfloat16,
        residual,
        0.0 if factor is None else factor.item(),
        error,
        n,
        *_format(size, bits, symmetric, hadamard, scale_dtype),
        packed,
        step,
        offset[0] if offset else None,
    )
    return packed, step, *offset


def _allocate(groups: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
    n, size = groups.shape
    scales = [torch.empty(n, dtype=scale_dtype, device="cpu") for _ in range(1 if symmetric else 2)]
    return torch.empty(n, packed_size(size, bits), dtype=torch.uint8, device="cpu"), *scales


def dequantize(
    packed: Tensor,
    step: Tensor,
    offset: Tensor | None,
    bits: int,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `reference.dequantize`."""
    n, size = packed.shape[0], packed.shape[1] * 8 // bits
    if n * size < native.LONG:
        return reference.dequantize(packed, step, offset, bits, hadamard, dtype)
    bf16 = dtype == torch.bfloat16
    values = torch.empty(n, size, dtype=torch.bfloat16 if bf16 else torch.float32, device="cpu")
    if not _compiled(values):
        parts = (packed, step) if offset is None else (packed, step, offset)
        for block, its_packed, its_step, *its_offset in _blocks(values, *parts):
            block.copy_(reference.dequantize(its_packed, its_step, *its_offset or [None], bits, hadamard))
    else:
        packed, step, offset = (
            None if part is None else part.contiguous() for part in (packed, step, offset)
        )
        grid = _format(size, bits, offset is None, hadamard, step.dtype)
        native.call("quantize", "dequantize_groups", packed, step, offset, n, *grid, values, bf16)
    return values.to(dtype)


def _compiled(groups: Tensor) -> bool:
    return groups.shape[1] <= LARGEST_GROUP and native.serves("quantize", groups.device, groups.numel())


def _sums(bits: int, symmetric: bool) -> bool:
    """Whether the grid follows from a sum, whose order is left to torch."""
    return symmetric and bits == 1


def _format(
    size: int, bits: int, symmetric: bool, hadamard: bool, scale_dtype: torch.dtype
) -> tuple[float, ...]:
    return size, bits, symmetric, hadamard, scale_dtype == torch.float32, size**-0.5


def _blocks(groups: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`groups` and others of the same length, so many rows at a time as make a block of `groups`."""
    rows = max(1, BLOCK // groups.shape[1])
    return zip(*(tensor.split(rows) for tensor in (groups, *others)))
