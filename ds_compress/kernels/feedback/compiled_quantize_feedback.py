"""Quantization of messages that follow a state by stateful.cpp."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels.feedback.reference import GROUP
from ds_compress.kernels.native.function import FLAG, Buffer, Function
from ds_compress.kernels.quantize.compiled import FLOATS, FORMAT, PARTS, VALUES, known, parts_of
from ds_compress.kernels.quantize.grid import Grid

_STATE: dict[str, Any] = {"halved": FLAG, "held": Buffer(FLOATS, ("n", "size"), by="halved")}
_CODES: dict[str, Any] = {
    "codes": Buffer((torch.int8,), ("n", "size")),
    "scales": Buffer((torch.float32,), ("n", "size"), per=GROUP),
}
_BASE: dict[str, Any] = {**VALUES, **FORMAT, **PARTS, "scale": float}
_SHARES: dict[str, Any] = {"share": float, "rest": float}

_with_residual = Function("quantize_feedback", "quantize_with_residual", "n", **_BASE, **_SHARES, **_STATE)
_with_coded_residual = Function(
    "quantize_feedback", "quantize_with_coded_residual", "n", **_BASE, **_SHARES, **_CODES
)
_change = Function("quantize_feedback", "quantize_change", "n", **_BASE, **_STATE)
_onto = Function("quantize_feedback", "dequantize_change", "n", **_BASE, **_STATE)


class Plan:
    """What a grid makes of values of one dtype, fp32 or bf16, in groups of `size`, and of their state, in
    `store`: all that C++ is told but the memory of the message."""

    def __init__(self, numel: int, size: int, grid: Grid, dtype: torch.dtype, store: torch.dtype):
        self.n = numel // size
        fixed = known(self.n, size, grid, dtype)
        if store == torch.int8:
            self.residual = _with_coded_residual.given(**fixed)
        else:
            fixed["halved"] = store == torch.bfloat16
            self.residual = _with_residual.given(**fixed)
            self.change, self.onto = _change.given(**fixed), _onto.given(**fixed)


_plan = lru_cache(Plan)  # a message has the shape of the one before


def holds(state: Sequence[Tensor], size: int) -> bool:
    """Whether C++ knows `state`, of groups of so many values: groups of int8 codes are whole numbers of
    those, or parts of them."""
    if len(state) == 1:
        return state[0].dtype in FLOATS
    return state[0].dtype == torch.int8 and (size in (32, 64) or size % GROUP == 0)


def quantize_with_residual(
    values: Tensor,
    residual: tuple[Tensor, ...],
    scale: float,
    share: float,
    rest: float,
    grid: Grid,
    size: int,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """See `reference.quantize_with_residual`; of `values`, fp32 or bf16, in groups of `size`. The next
    residual takes the place of the old one."""
    plan = _plan(values.numel(), size, grid, values.dtype, residual[0].dtype)
    parts = out or parts_of(plan.n, size, grid)
    held = tuple(map(Tensor.contiguous, residual))
    plan.residual(values.contiguous(), *parts, scale, share, rest, *held)
    return parts, held


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_change`; of `values`, fp32 or bf16, in groups of `size`. The next state takes
    the place of the old one."""
    plan = _plan(values.numel(), size, grid, values.dtype, state.dtype)
    parts, held = out or parts_of(plan.n, size, grid), state.contiguous()
    plan.change(values.contiguous(), *parts, scale, held)
    return parts, held


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.dequantize_change`; `dtype` is fp32 or bf16. The next state takes the place of the old
    one."""
    held, size = state.contiguous(), parts[0].shape[1] * 8 // grid.bits
    values = torch.empty(state.shape, dtype=dtype, device="cpu")
    plan = _plan(parts[0].shape[0] * size, size, grid, dtype, state.dtype)
    plan.onto(values, *map(Tensor.contiguous, parts), scale, held)
    return values, held
