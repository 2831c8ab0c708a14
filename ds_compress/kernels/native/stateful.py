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
_FLAGS = [torch.tensor(flag, dtype=torch.bool, device="cpu") for flag in (False, True)]  # made once
_BASE: dict[str, Any] = {**VALUES, **FORMAT, **PARTS, "scale": float}

_with_residual = Function(
    "stateful", "quantize_with_residual", "n", **_BASE, share=float, rest=float, residual=_STATE, made=_STATE
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
    made=_CODES,
    made_scales=_SCALES,
)
_change = Function("stateful", "quantize_change", "n", **_BASE, old=_STATE, made=_STATE)
_onto = Function("stateful", "dequantize_change", "n", **_BASE, old=_STATE, made=_STATE)


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
    residual: Sequence[Tensor],
    scale: float,
    share: float,
    rest: float,
    grid: Grid,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """See `reference.quantize_with_residual`; of `values`, fp32 or bf16 [n, G]."""
    n, size = values.shape
    plan, parts = _plan(n, size, grid, values.dtype), out or parts_of(n, size, grid)
    call = plan.residual if len(residual) == 1 else plan.coded
    old = [entry.contiguous() for entry in residual]
    new = tuple(torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for entry in old)
    given = values.contiguous(), *parts, scale, share, rest, *old, *new
    # what is not finite leaves the state alone, all of it: parts know nothing of each other
    finite = call(*given) or call(*given, threads=1)
    return parts, new, _FLAGS[finite]


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """See `reference.quantize_change`; of `values`, fp32 or bf16 [n, G]."""
    n, size = values.shape
    plan, parts = _plan(n, size, grid, values.dtype), out or parts_of(n, size, grid)
    new = torch.empty(state.shape, dtype=torch.float32, device="cpu")
    finite = plan.change(values.contiguous(), *parts, scale, state.contiguous(), new)
    return parts, new, _FLAGS[finite]


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.dequantize_change`; `dtype` is fp32 or bf16."""
    n, size = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    plan = _plan(n, size, grid, dtype)
    values = torch.empty(n, size, dtype=dtype, device="cpu")
    new = torch.empty(n, size, dtype=torch.float32, device="cpu")
    finite = plan.onto(values, *map(Tensor.contiguous, parts), scale, state.contiguous(), new)
    return values, new, _FLAGS[finite]
