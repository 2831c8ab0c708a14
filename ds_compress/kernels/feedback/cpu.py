"""State updates of feedbacks on the CPU: feedback.cpp alone, quantize_feedback.cpp fused with quantization.

States are fp32 in feedback.cpp; messages are fp32 or bf16 in both.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.feedback import reference
from ds_compress.kernels.feedback.reference import GROUP
from ds_compress.kernels.memory import Parts
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, Buffer, Call, Function
from ds_compress.kernels.quantize import cpu as quantize
from ds_compress.kernels.quantize.cpu import FORMAT, LARGEST_GROUP, PARTS, VALUES
from ds_compress.kernels.quantize.grid import Grid

__all__ = reference.__all__

_STATE = Buffer((torch.float32,), ("n",))
_MESSAGE: dict[str, Any] = {"values": Buffer(FLOATS, ("n",), dtype_from="bf16"), "bf16": FLAG, "n": SIZE}
_SAME = _MESSAGE["values"]
_FACTORS: dict[str, Any] = {"scale": float, "residual_decay": float, "error_weight": float}
_delta = Function("feedback", "delta", **_MESSAGE, state=_STATE, factor=float, y=_SAME)
_update_residual = Function(
    *("feedback", "update_residual"), **_MESSAGE, residual=_STATE, sent=_SAME, **_FACTORS, next=_STATE
)


def _call(function: Function, message: Tensor) -> Call:
    """Return the call of `function` for messages like this one."""
    return function.bind(bf16=message.dtype == torch.bfloat16, n=message.numel())


def delta(x: Tensor, state: Tensor, factor: float) -> Tensor:
    if not _is_supported(state, x):
        return reference.delta(x, state, factor)
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x, state = x.detach().contiguous(), state.detach().contiguous()
    _call(_delta, x)(x, state, factor, y)
    return y


def add_residual(x: Tensor, residual: Tensor, factor: float, finite: Tensor) -> Tensor:
    """See `reference.add_residual`; a CPU reads `finite` at no cost."""
    if _is_supported(residual, x):
        return delta(x, residual, -(factor if finite else 0.0))  # the sign of a zero is that of a sum
    return reference.add_residual(x, residual, factor, finite)


def update_residual(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, residual_decay: float, error_weight: float
) -> tuple[Tensor, Tensor]:
    if not _is_supported(residual, x) or sent.dtype != x.dtype:
        return reference.update_residual(x, residual, sent, scale, residual_decay, error_weight)
    new = torch.empty(residual.shape, dtype=torch.float32, device="cpu")
    x, residual, sent = (tensor.detach().contiguous() for tensor in (x, residual, sent))
    kept = _call(_update_residual, x)(x, residual, sent, scale, residual_decay, error_weight, new)
    return new, torch.tensor(bool(kept), dtype=torch.bool, device="cpu")


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """See `reference.choose`; a CPU reads the condition at no cost."""
    return first if condition else second


def _is_supported(state: Tensor, message: Tensor) -> bool:
    dtypes = state.dtype == torch.float32 and message.dtype in FLOATS
    return dtypes and state.shape == message.shape and native.serves(state.numel())


_STORES = (torch.float32, torch.bfloat16, torch.int8)
_FUSED: dict[str, Any] = {
    **VALUES,
    **FORMAT,
    **PARTS,
    "scale": float,
    "stored": range(len(_STORES)),
    "state": Buffer(_STORES, ("n", "size"), dtype_from="stored"),
    "scales": Buffer((torch.float32,), ("n", "size"), per=GROUP, optional=True),
}
_with_residual = Function(
    *("quantize_feedback", "quantize_with_residual"), **_FUSED, residual_decay=float, error_weight=float
)
_change = Function("quantize_feedback", "quantize_change", **_FUSED)
_decode_change = Function("quantize_feedback", "dequantize_change", **_FUSED)


class FeedbackPlan:
    """Calls for values of one dtype, fp32 or bf16, in groups of `size`, with a state stored as `stored`."""

    def __init__(self, numel: int, size: int, grid: Grid, dtype: torch.dtype, stored: torch.dtype):
        self.n = numel // size
        known = quantize.format_arguments(self.n, size, grid, dtype) | {"stored": _STORES.index(stored)}
        if stored != torch.int8:
            known["scales"] = None
        self.residual = _with_residual.bind(**known)
        self.change, self.decode = _change.bind(**known), _decode_change.bind(**known)


_plan = lru_cache(FeedbackPlan)  # most messages have the shape of the one before


def quantize_with_residual(
    values: Tensor,
    residual: Parts,
    scale: float,
    residual_decay: float,
    error_weight: float,
    grid: Grid,
    size: int,
    out: Parts | None = None,
) -> tuple[Parts, Parts]:
    """See `reference.FusedFeedback`. The next residual overwrites the old one."""
    if not _is_fused(values.numel(), size, values.dtype, residual, grid):
        return reference.quantize_with_residual(
            values, residual, scale, residual_decay, error_weight, grid, size, out
        )
    plan = _plan(values.numel(), size, grid, values.dtype, residual[0].dtype)
    parts = out or quantize.empty_parts(plan.n, size, grid)
    stored = tuple(map(Tensor.contiguous, residual))
    plan.residual(values.contiguous(), *parts, scale, *stored, residual_decay, error_weight)
    return parts, stored


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, size: int, out: Parts | None = None
) -> tuple[Parts, Tensor]:
    """See `reference.FusedFeedback`. The next state overwrites the old one."""
    if not _is_fused(values.numel(), size, values.dtype, (state,), grid):
        return reference.quantize_change(values, state, scale, grid, size, out)
    plan = _plan(values.numel(), size, grid, values.dtype, state.dtype)
    parts, state = out or quantize.empty_parts(plan.n, size, grid), state.contiguous()
    plan.change(values.contiguous(), *parts, scale, state)
    return parts, state


def dequantize_change(
    parts: Sequence[Tensor], state: Tensor, scale: float, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.FusedFeedback`. The next state overwrites the old one."""
    size = parts[0].shape[1] * 8 // grid.bits
    if not _is_fused(state.numel(), size, dtype, (state,), grid):
        return reference.dequantize_change(parts, state, scale, grid, dtype)
    values, state = torch.empty(state.shape, dtype=dtype, device="cpu"), state.contiguous()
    plan = _plan(parts[0].shape[0] * size, size, grid, dtype, state.dtype)
    plan.decode(values, *map(Tensor.contiguous, parts), scale, state)
    return values, state


def _is_fused(numel: int, size: int, dtype: torch.dtype, state: Sequence[Tensor], grid: Grid) -> bool:
    """Return whether quantize_feedback.cpp supports the message and its state, as stored."""
    if dtype not in FLOATS or size > LARGEST_GROUP:
        return False
    # groups of int8 codes are whole numbers of quantization groups, or parts of them
    int8 = state[0].dtype == torch.int8 and (size in (32, 64) or size % GROUP == 0)
    stored = state[0].dtype in FLOATS if len(state) == 1 else int8
    return stored and native.serves(numel)
