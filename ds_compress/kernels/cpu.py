"""Quantization on the CPU: `reference` in C++ (native/quantize.cpp), equal to it bit for bit.

The reference writes the result of every operation to memory. Without a C++ compiler, and for what the compiled passes
do not know, it runs in blocks that fit in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.memory import keep_freed

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
    n, size = groups.shape
    if generator is not None or groups.numel() < native.LONG:
        return reference.quantize(groups, bits, symmetric, scale_dtype, hadamard, generator)
    keep_freed(groups.nbytes)
    groups = groups.detach()
    scales = [torch.empty(n, dtype=scale_dtype) for _ in range(1 if symmetric else 2)]
    out = (torch.empty(n, packed_size(size, bits), dtype=torch.uint8), *scales)
    one_bit_mean = symmetric and bits == 1  # a sum, whose order is left to torch
    if one_bit_mean or not _compiled(groups):
        for block, *parts in _blocks(size, groups, *out):
            for part, result in zip(parts, reference.quantize(block, bits, symmetric, scale_dtype, hadamard)):
                part.copy_(result)
        return out
    values = groups.contiguous() if groups.dtype == torch.bfloat16 else groups.float().contiguous()
    grid = _format(size, bits, symmetric, hadamard, scale_dtype)
    native.call("quantize", "quantize_groups", values, values.dtype == torch.bfloat16, n, *grid, *out, *_no(symmetric))
    return out


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
    keep_freed(n * size * dtype.itemsize)
    parts = tuple(part.contiguous() for part in (packed, step, offset) if part is not None)
    if not _compiled(packed, size):
        values = torch.empty(n, size, dtype=dtype)
        for block, its_packed, its_step, *its_offset in _blocks(size, values, *parts):
            block.copy_(reference.dequantize(its_packed, its_step, *its_offset or [None], bits, hadamard))
        return values
    values = torch.empty(n, size, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
    grid = _format(size, bits, offset is None, hadamard, step.dtype)
    bf16 = dtype == torch.bfloat16
    native.call("quantize", "dequantize_groups", *parts, *_no(offset is None), n, *grid, values, bf16)
    return values.to(dtype)


def _compiled(groups: Tensor, size: int | None = None) -> bool:
    size = size or groups.shape[1]
    return size <= LARGEST_GROUP and native.serves("quantize", groups.device, len(groups) * size)


def _format(size: int, bits: int, symmetric: bool, hadamard: bool, scale_dtype: torch.dtype) -> tuple[float, ...]:
    return size, bits, symmetric, hadamard, scale_dtype == torch.float32, size**-0.5


def _no(offset: bool) -> tuple[None, ...]:
    return (None,) if offset else ()


def _blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`tensors` of equal length, so many rows of `size` values at a time as make a block."""
    return zip(*(tensor.split(max(1, BLOCK // size)) for tensor in tensors))
