"""Group-wise quantization by quantize.cpp."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.native.function import FLAG, SIZE, Buffer, Function

LARGEST_GROUP = 4096
"""Values of a group that a pass can hold."""

FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes that `quantize` takes and `dequantize` makes."""

_SCALES = (torch.bfloat16, torch.float32)

_VALUES: dict[str, Any] = {"values": Buffer(FLOATS, ("n", "size"), by="bf16"), "bf16": FLAG}
_FEEDBACK: dict[str, Any] = {
    "residual": Buffer((torch.float32,), ("n", "size")),
    "factor": float,
    "error": Buffer((torch.float32,), ("n", "size")),
}
_FORMAT: dict[str, Any] = {
    "n": SIZE,
    "size": range(8, LARGEST_GROUP + 1, 8),
    "bits": range(1, 9),
    "symmetric": FLAG,
    "hadamard": FLAG,
    "wide_scale": FLAG,
    "scale": float,
}
_PARTS: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("n", "size", "bits"), per=8),
    "steps": Buffer(_SCALES, ("n",), by="wide_scale"),
    "offsets": Buffer(_SCALES, ("n",), by="wide_scale", unless="symmetric"),
}
_quantize = Function("quantize", "quantize_groups", **_VALUES, **_FORMAT, **_PARTS)
_quantize_with_error = Function(
    "quantize", "quantize_groups_with_error", **_VALUES, **_FEEDBACK, **_FORMAT, **_PARTS
)
_dequantize = Function("quantize", "dequantize_groups", **_VALUES, **_FORMAT, **_PARTS)


def quantize(values: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    """See `reference.quantize`; of `values`, fp32 or bf16 [n, G]."""
    parts = empty(values.shape, grid)
    _quantize(**_given(values.detach().contiguous()), **_format(values.shape, grid), **_named(parts))
    return parts


def quantize_with_error(
    values: Tensor, residual: Tensor, factor: Tensor, grid: Grid
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_error`."""
    parts, error = empty(values.shape, grid), torch.empty(values.shape, dtype=torch.float32, device="cpu")
    feedback = {"residual": residual.detach().contiguous(), "factor": factor.item(), "error": error}
    given = _given(values.detach().contiguous())
    _quantize_with_error(**given, **feedback, **_format(values.shape, grid), **_named(parts))
    return parts, error


def dequantize(parts: Sequence[Tensor], grid: Grid, dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize`; `dtype` is fp32 or bf16."""
    shape = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    values = torch.empty(shape, dtype=dtype, device="cpu")
    _dequantize(**_given(values), **_format(shape, grid), **_named([part.contiguous() for part in parts]))
    return values


def empty(shape: Sequence[int], grid: Grid) -> tuple[Tensor, ...]:
    """Memory for what `quantize` returns of [n, G]."""
    n, size = shape
    scales = [torch.empty(n, dtype=grid.scale_dtype, device="cpu") for _ in range(2 - grid.symmetric)]
    return torch.empty(n, packed_size(size, grid.bits), dtype=torch.uint8, device="cpu"), *scales


def _given(values: Tensor) -> dict[str, Tensor | bool]:
    return {"values": values, "bf16": values.dtype == torch.bfloat16}


def _named(parts: Sequence[Tensor]) -> dict[str, Tensor | None]:
    packed, step, *offset = parts
    return {"packed": packed, "steps": step, "offsets": offset[0] if offset else None}


def _format(shape: Sequence[int], grid: Grid) -> dict[str, float]:
    n, size = shape
    if grid.hadamard and size & (size - 1):
        raise ValueError(f"a rotation of {size} values came, expected a power of two")
    return {
        "n": n,
        "size": size,
        "bits": grid.bits,
        "symmetric": grid.symmetric,
        "hadamard": grid.hadamard,
        "wide_scale": grid.scale_dtype == torch.float32,
        "scale": size**-0.5,
    }
