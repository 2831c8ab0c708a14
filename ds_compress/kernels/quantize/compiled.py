"""Group-wise quantization by quantize.cpp."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.memory import unmade
from ds_compress.kernels.native.function import FLAG, SIZE, WORD, Buffer, Function
from ds_compress.kernels.quantize import gaussian
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.dither import halves
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.quantize.hadamard import diagonal

LARGEST_GROUP = 4096
"""Values of a group that a pass can hold."""

FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes that `quantize` takes and `dequantize` makes."""

_SCALES = (torch.bfloat16, torch.float32)

VALUES: dict[str, Any] = {"values": Buffer(FLOATS, ("n", "size"), by="bf16"), "bf16": FLAG}
FORMAT: dict[str, Any] = {
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
PARTS: dict[str, Any] = {
    "packed": Buffer((torch.uint8,), ("n", "size", "bits"), per=8),
    "steps": Buffer(_SCALES, ("n",), by="wide_scale"),
    "offsets": Buffer(_SCALES, ("n",), by="wide_scale", unless="symmetric"),
}
_DITHER: dict[str, Any] = {"dithered": FLAG, "first": WORD, "second": WORD}
_quantize = Function("quantize", "quantize_groups", "n", **VALUES, **_DITHER, **FORMAT, **PARTS)
_dithered = Function("quantize", "quantize_groups", **VALUES, **_DITHER, **FORMAT, **PARTS)
"""The same: which number is drawn for a value depends on how many are before it."""
_dequantize = Function("quantize", "dequantize_groups", "n", **VALUES, **FORMAT, **PARTS)


class Plan:
    """What a grid makes of [n, size] values of one dtype, fp32 or bf16: all that C++ is told but the memory
    of a message."""

    def __init__(self, numel: int, size: int, grid: Grid, dtype: torch.dtype):
        """
        Raises:
            ValueError: there are no such groups.
        """
        self.n, rest = divmod(numel, size)
        if rest:
            raise ValueError(f"{numel} values came, expected a multiple of {size}")
        fixed = known(self.n, size, grid, dtype)
        self.nearest = _quantize.given(**fixed, dithered=False, first=0, second=0)
        self.dithered = _dithered.given(**fixed, dithered=True)
        self.back = _dequantize.given(**fixed)


_plan = lru_cache(Plan)  # a message has the shape of the one before


class Back(NamedTuple):
    """What makes values of packed codes."""

    numel: int
    template: Tensor
    """What new memory for them is made from, see `unmade`."""
    call: Callable[..., int]
    """Gets that memory and what `reference.quantize` returned."""


@lru_cache
def back(
    packed: tuple[int, int], grid: Grid, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> Back | None:
    """What `reference.dequantize` does to codes of the shape `packed`, for fp32 or bf16; None for groups too
    large."""
    n, width = packed
    size = width * 8 // grid.bits
    if size > LARGEST_GROUP:
        return None
    template = unmade((n, size) if shape is None else shape, dtype)
    numel = template.numel()
    return Back(numel, template, _plan(numel, size, grid, dtype).back.__call__)


def quantize(
    values: Tensor, size: int, grid: Grid, dither: int | None = None, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """See `reference.quantize`; of `values`, fp32 or bf16, in groups of `size`."""
    plan = _plan(values.numel(), size, grid, values.dtype)
    parts = parts_of(plan.n, size, grid) if out is None else out
    if dither is None:
        plan.nearest(values, *parts)
    else:
        plan.dithered(values, *halves(dither), *parts)
    return parts


def parts_of(n: int, size: int, grid: Grid) -> tuple[Tensor, ...]:
    """Memory for what is made of [n, size] values: packed codes, steps, offsets unless the grid is
    symmetric."""
    packed = torch.empty(n, packed_size(size, grid.bits), dtype=torch.uint8, device="cpu")
    steps = torch.empty(n, dtype=grid.scale_dtype, device="cpu")
    if grid.symmetric:
        return packed, steps
    return packed, steps, torch.empty(n, dtype=grid.scale_dtype, device="cpu")


def known(n: int, size: int, grid: Grid, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that say what is to be done to [n, size] values of `dtype`.

    Raises:
        ValueError: there is no such rotation.
    """
    if (grid.hadamard or grid.gaussian) and size & (size - 1):
        raise ValueError(f"a rotation of {size} values came, expected a power of two")
    missing = {"offsets": None} if grid.symmetric else {}
    return {
        **missing,
        "bf16": dtype == torch.bfloat16,
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
