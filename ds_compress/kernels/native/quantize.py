"""Group-wise quantization by quantize.cpp."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import gaussian
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.bits import packed_size
from ds_compress.kernels.dither import halves
from ds_compress.kernels.hadamard import diagonal
from ds_compress.kernels.native.function import FLAG, SIZE, WORD, Buffer, Function

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
    "wide_scale": FLAG,
    "unrotated": FLAG,
    "diagonal": Buffer((torch.float32,), ("size",), unless="unrotated"),
    "uniform": FLAG,
    "levels": Buffer((torch.float32,), (2, 16), unless="uniform"),
}
_PARTS: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("n", "size", "bits"), per=8),
    "steps": Buffer(_SCALES, ("n",), by="wide_scale"),
    "offsets": Buffer(_SCALES, ("n",), by="wide_scale", unless="symmetric"),
}
_DITHER: dict[str, Any] = {"dithered": FLAG, "first": WORD, "second": WORD}
_NO_DRAWS: dict[str, Any] = {"dithered": False, "first": 0, "second": 0}
_quantize = Function("quantize", "quantize_groups", **_VALUES, **_DITHER, **_FORMAT, **_PARTS)
_quantize_with_error = Function(
    "quantize", "quantize_groups_with_error", **_VALUES, **_FEEDBACK, **_FORMAT, **_PARTS
)
_dequantize = Function("quantize", "dequantize_groups", **_VALUES, **_FORMAT, **_PARTS)


def quantize(
    values: Tensor,
    grid: Grid,
    dither: int | None = None,
    function: Function = _quantize,
    feedback: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.quantize`; of `values`, fp32 or bf16 [n, G]. `feedback`: what `function` takes in the
    place of the draws."""
    more = feedback or (_NO_DRAWS if dither is None else _draws(dither))
    n, size = values.shape
    packed = torch.empty(n, packed_size(size, grid.bits), dtype=torch.uint8, device="cpu")
    steps = torch.empty(n, dtype=grid.scale_dtype, device="cpu")
    offsets = None if grid.symmetric else torch.empty(n, dtype=grid.scale_dtype, device="cpu")
    function(
        values=values.detach().contiguous(),
        bf16=values.dtype == torch.bfloat16,
        **more,
        **_format(n, size, grid),
        packed=packed,
        steps=steps,
        offsets=offsets,
    )
    return (packed, steps) if offsets is None else (packed, steps, offsets)


def quantize_with_error(
    values: Tensor, residual: Tensor, factor: Tensor, grid: Grid
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_error`."""
    error = torch.empty(values.shape, dtype=torch.float32, device="cpu")
    feedback = {"residual": residual.detach().contiguous(), "factor": factor.item(), "error": error}
    return quantize(values, grid, None, _quantize_with_error, feedback), error


def dequantize(parts: Sequence[Tensor], grid: Grid, dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize`; `dtype` is fp32 or bf16."""
    packed, steps, *offsets = parts
    n, size = packed.shape[0], packed.shape[1] * 8 // grid.bits
    values = torch.empty(n, size, dtype=dtype, device="cpu")
    _dequantize(
        values=values,
        bf16=dtype == torch.bfloat16,
        **_format(n, size, grid),
        packed=packed.contiguous(),
        steps=steps.contiguous(),
        offsets=offsets[0].contiguous() if offsets else None,
    )
    return values


def _draws(dither: int) -> dict[str, Any]:
    first, second = halves(dither)
    return {"dithered": True, "first": first, "second": second}


@lru_cache  # a message has the shape of the one before
def _format(n: int, size: int, grid: Grid) -> dict[str, Any]:
    """The arguments that say what is to be done to [n, size]."""
    if (grid.hadamard or grid.gaussian) and size & (size - 1):
        raise ValueError(f"a rotation of {size} values came, expected a power of two")
    return {
        "n": n,
        "size": size,
        "bits": grid.bits,
        "symmetric": grid.symmetric,
        "wide_scale": grid.scale_dtype == torch.float32,
        "unrotated": not grid.hadamard,
        "diagonal": diagonal(size, grid.key, torch.device("cpu")) if grid.hadamard else None,
        "uniform": not grid.gaussian,
        "levels": _levels(grid.bits) if grid.gaussian else None,
    }


def _levels(bits: int) -> Tensor:
    """fp32 [2, 16]: levels above 0, again and again, and squared boundaries between them, filled up with
    zeros."""
    levels, boundaries = gaussian.levels(bits), gaussian.squared_boundaries(bits)
    rows = [[*levels] * (16 // len(levels)), [*boundaries, *[0.0] * (16 - len(boundaries))]]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")
