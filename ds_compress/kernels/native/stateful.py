"""Quantization of messages that follow a state by stateful.cpp; states are fp32, or int8 with scales."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.native.function import Buffer, Function
from ds_compress.kernels.native.quantize import FORMAT, PARTS, VALUES, known, parts_of
from ds_compress.kernels.reference.feedback import GROUP

_STATE = Buffer((torch.float32,), ("n", "size"))
_CODES = Buffer((torch.int8,), ("n", "size"))
_SCALES = Buffer((torch.float32,), ("n", "size"), per=GROUP)
_BASE: dict[str, Any] = {**VALUES, **FORMAT, **PARTS, "scale": float}

_with_residual = Function(
    "stateful", "quantize_with_residual", "n", **_BASE, share=float, rest=float, residual=_STATE
)
_with_coded_residual = Function(
    "stateful",
    "quantize_with_coded_residual",
    "n",
    **_BASE,
    share=float,
    rest=float,
    codes=_CODES,
    scales=_SCALES,
)
_change = Function("stateful", "quantize_change", "n", **_BASE, held=_STATE)
_onto = Function("stateful", "dequantize_change", "n", **_BASE, held=_STATE)


class Plan:
    """What a grid makes of [n, size] values of one dtype, fp32 or bf16, and of their state: all that C++ is
    told but the memory of the message."""

    def __init__(self, n: int, size: int, grid: Grid, dtype: torch.dtype):
        fixed = known(n, size, grid, dtype)
        self.residual, self.coded = _with_residual.given(**fixed), _with_coded_residual.given(**fixed)
        self.change, self.onto = _change.given(**fixed), _onto.given(**fixed)


_plan = lru_cache(Plan)  # a message has the shape of the one before


def holds(state: Sequence[Tensor], size: int) -> bool:
    """Whether C++ knows `state`, of groups of so many values: groups of int8 codes are whole numbers of
    those, or parts of them."""
    return state[0].dtype == (torch.int8 if len(state) == 2 else torch.float32) and (
        len(state) == 1 or size in (32, 64) or size % GROUP == 0
    )


def quantize_with_residual(
    values: Tensor,
    residual: tuple[Tensor, ...],
    scale: float,
    share: float,
    rest: float,
    grid: Grid,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """See `reference.quantize_with_residual`; of `values`, fp32 or bf16 [n, G]. The next residual takes the
    place of the old one."""
    n, size = values.shape
    plan, parts = _plan(n, size, grid, values.dtype), out or parts_of(n, size, grid)
    held = tuple(entry.contiguous() for entry in residual)
    call = plan.residual if len(held) == 1 else plan.coded
    call(values.contiguous(), *parts, scale, share, rest, *held)
    return parts, held


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_change`; of `values`, fp32 or bf16 [n, G]. The next state takes the place of
    the old one."""
    n, size = values.shape
    plan, parts, held = _plan(n, size, grid, values.dtype), out or parts_of(n, size, grid), state.contiguous()
    plan.change(values.contiguous(), *parts, scale, held)
    return parts, held


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.dequantize_change`; `dtype` is fp32 or bf16. The next state takes the place of the old
    one."""
    n, size = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    held, values = state.contiguous(), torch.empty(n, size, dtype=dtype, device="cpu")
    _plan(n, size, grid, dtype).onto(values, *map(Tensor.contiguous, parts), scale, held)
    return values, held
