"""Quantization on the CPU by quantize.cpp.

Without compiled kernels, and for what they do not support, the reference runs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import library, native
from ds_compress.kernels.memory import Parts, empty_template
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, WORD, Buffer, Function
from ds_compress.kernels.quantize import reference
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid, key_halves
from ds_compress.kernels.quantize.hadamard import diagonal

__all__ = ["dequantize", "quantize"]

LARGEST_GROUP = 4096
"""Values of a group for which the kernels have memory."""

VALUES: dict[str, Any] = {"values": Buffer(FLOATS, ("n", "size"), dtype_from="bf16"), "bf16": FLAG}
FORMAT: dict[str, Any] = {
    "n": SIZE,
    "size": range(8, LARGEST_GROUP + 1, 8),
    "bits": range(1, 9),
    "diagonal": Buffer((torch.float32,), ("size",), optional=True),
}
PARTS: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("n", "size", "bits"), per=8),
    "steps": Buffer((torch.bfloat16,), ("n",)),
    "offsets": Buffer((torch.bfloat16,), ("n",)),
}
_DITHER: dict[str, Any] = {"dithered": FLAG, "first": WORD, "second": WORD}
_quantize = Function("quantize", "quantize_groups", **VALUES, **FORMAT, **PARTS, **_DITHER)
_dequantize = Function("quantize", "dequantize_groups", **VALUES, **FORMAT, **PARTS, **_DITHER)


class QuantizePlan:
    """Calls for `numel` values of one dtype, fp32 or bf16, in groups of `size`, dithered or not."""

    def __init__(self, numel: int, size: int, grid: Grid, dtype: torch.dtype, dithered: bool):
        """
        Raises:
            ValueError: `numel` is not a multiple of `size`.
        """
        self.n, rest = divmod(numel, size)
        if rest:
            raise ValueError(f"{numel} values came, expected a multiple of {size}")
        known = format_arguments(self.n, size, grid, dtype) | {"dithered": dithered}
        known |= {} if dithered else {"first": 0, "second": 0}
        self.encode, self.decode = _quantize.bind(**known), _dequantize.bind(**known)


class DecodePlan:
    """A call for packed codes of shape `packed`, and a template of the result."""

    def __init__(
        self,
        packed: tuple[int, int],
        grid: Grid,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None,
        dithered: bool,
    ):
        n, width = packed
        size = width * 8 // grid.bits
        self.dtype = dtype if dtype in FLOATS else torch.float32
        self.template = empty_template((n, size) if shape is None else shape, self.dtype)
        self.numel = self.template.numel()
        self.is_supported = size <= LARGEST_GROUP
        if self.is_supported:
            self.call = _plan(self.numel, size, grid, self.dtype, dithered).decode.__call__


_plan = lru_cache(QuantizePlan)  # most messages have the shape of the one before
_decode_plan = lru_cache(DecodePlan)


def quantize(
    groups: Tensor, grid: Grid, dither: int | None = None, out: Parts | None = None, size: int | None = None
) -> Parts:
    numel, size = groups.numel(), size or groups.shape[1]
    # as `native.serves`, without its frame
    if size > LARGEST_GROUP or numel < native.LONG or library.load() is None:
        return reference.quantize(groups, grid, dither, out, size)
    groups = groups.contiguous() if groups.dtype in FLOATS else groups.float().contiguous()
    plan = _plan(numel, size, grid, groups.dtype, dither is not None)
    parts = empty_parts(plan.n, size, grid) if out is None else out
    plan.encode(groups, *parts, *(() if dither is None else key_halves(dither)))
    return parts


def dequantize(
    parts: Sequence[Tensor],
    grid: Grid,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    dither: int | None = None,
) -> Tensor:
    plan = _decode_plan(parts[0].shape, grid, dtype, shape, dither is not None)
    if not plan.is_supported or plan.numel < native.LONG or library.load() is None:
        return reference.dequantize(parts, grid, dtype, shape, dither)
    values = torch.empty_like(plan.template)
    plan.call(values, *parts, *(() if dither is None else key_halves(dither)))
    return values if values.dtype is dtype else values.to(dtype)


def empty_parts(n: int, size: int, grid: Grid) -> Parts:
    """Return memory for what `quantize` returns for [n, size] values."""
    packed = torch.empty(n, packed_size(size, grid.bits), dtype=torch.uint8, device="cpu")
    steps = torch.empty(n, dtype=torch.bfloat16, device="cpu")
    return packed, steps, torch.empty_like(steps)


def format_arguments(n: int, size: int, grid: Grid, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of C++ that are known before a message comes, for [n, size] values of `dtype`.

    Raises:
        ValueError: a rotation needs a power of two as `size`.
    """
    if grid.hadamard and size & (size - 1):
        raise ValueError(f"a rotation of {size} values came, expected a power of two")
    return {
        "bf16": dtype == torch.bfloat16,
        "n": n,
        "size": size,
        "bits": grid.bits,
        "diagonal": diagonal(size, grid.key, torch.device("cpu")) if grid.hadamard else None,
    }
