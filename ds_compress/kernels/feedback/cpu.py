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
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, Buffer, Function, for_each_dtype
from ds_compress.kernels.quantize import cpu as quantize
from ds_compress.kernels.quantize.cpu import FORMAT, LARGEST_GROUP, PARTS, VALUES
from ds_compress.kernels.quantize.grid import Grid

__all__ = reference.__all__

_STATE = Buffer((torch.float32,), ("n",))
_CODES = Buffer((torch.int8,), ("n",))
_SCALES = Buffer((torch.float32,), ("n",), per=GROUP)


_delta = for_each_dtype(
    *("feedback", "delta_", FLOATS, "n"), x=("n",), state=_STATE, factor=float, n=SIZE, y=("n",)
)
_update_state = for_each_dtype(
    *("feedback", "update_state_", FLOATS, "n"),
    state=_STATE,
    change=("n",),
    divisor=float,
    n=SIZE,
    new=_STATE,
)
_is_finite = for_each_dtype("feedback", "is_finite_", FLOATS, "n", x=("n",), n=SIZE)
_update_residual = for_each_dtype(
    *("feedback", "update_residual_", FLOATS, "n"),
    x=("n",),
    residual=_STATE,
    sent=("n",),
    **dict.fromkeys(("scale", "residual_decay", "error_weight"), float),
    n=SIZE,
    new=_STATE,
)
_encode_int8 = Function("feedback", "encode_int8", "n", values=_STATE, n=SIZE, codes=_CODES, scales=_SCALES)
_decode_int8 = Function("feedback", "decode_int8", "n", codes=_CODES, scales=_SCALES, n=SIZE, values=_STATE)


def delta(x: Tensor, state: Tensor, factor: float) -> Tensor:
    if not _is_supported(state, x):
        return reference.delta(x, state, factor)
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x, state = x.detach().contiguous(), state.detach().contiguous()
    _delta[x.dtype](x=x, state=state, factor=factor, n=x.numel(), y=y)
    return y


def add_residual(x: Tensor, residual: Tensor, factor: float, finite: Tensor) -> Tensor:
    """See `reference.add_residual`; a CPU reads `finite` at no cost."""
    if _is_supported(residual, x):
        return delta(x, residual, -(factor if finite else 0.0))  # the sign of a zero is that of a sum
    return reference.add_residual(x, residual, factor, finite)


def update_state(state: Tensor, change: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    if not _is_supported(state, change):
        return reference.update_state(state, change, divisor)
    new = torch.empty(state.shape, dtype=torch.float32, device="cpu")
    state, change = state.detach().contiguous(), change.detach().contiguous()
    finite = _update_state[change.dtype](state=state, change=change, divisor=divisor, n=new.numel(), new=new)
    return new, _as_tensor(finite)


def update_residual(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, residual_decay: float, error_weight: float
) -> tuple[Tensor, Tensor]:
    if not _is_supported(residual, x) or sent.dtype != x.dtype:
        return reference.update_residual(x, residual, sent, scale, residual_decay, error_weight)
    new = torch.empty(residual.shape, dtype=torch.float32, device="cpu")
    x, residual, sent = (tensor.detach().contiguous() for tensor in (x, residual, sent))
    finite = _update_residual[x.dtype](
        x=x,
        residual=residual,
        sent=sent,
        scale=scale,
        residual_decay=residual_decay,
        error_weight=error_weight,
        n=new.numel(),
        new=new,
    )
    return new, _as_tensor(finite)


def is_finite(matrix: Tensor) -> Tensor:
    if matrix.dtype not in FLOATS or not native.serves(matrix.numel()):
        return reference.is_finite(matrix)
    return _as_tensor(_is_finite[matrix.dtype](x=matrix.detach().contiguous(), n=matrix.numel()))


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """See `reference.choose`; a CPU reads the condition at no cost."""
    return first if condition else second


def encode_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.encode_int8`."""
    if not _is_supported(value, value):
        return reference.encode_int8(value)
    codes = torch.empty(value.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(-(-value.numel() // GROUP), dtype=torch.float32, device="cpu")
    _encode_int8(values=value.detach().contiguous(), n=value.numel(), codes=codes, scales=scales)
    return codes, scales


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """See `reference.decode_int8`."""
    if not native.serves(codes.numel()):
        return reference.decode_int8(codes, scales)
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    _decode_int8(codes=codes.contiguous(), scales=scales.contiguous(), n=codes.numel(), values=values)
    return values


def _is_supported(state: Tensor, message: Tensor) -> bool:
    dtypes = state.dtype == torch.float32 and message.dtype in FLOATS
    return dtypes and state.shape == message.shape and native.serves(state.numel())


def _as_tensor(finite: int) -> Tensor:
    return torch.tensor(bool(finite), dtype=torch.bool, device="cpu")


_STORED: dict[str, Any] = {
    "stored_bf16": FLAG,
    "state": Buffer((*FLOATS,), ("n", "size"), dtype_from="stored_bf16"),
}
_STORED_INT8: dict[str, Any] = {
    "codes": Buffer((torch.int8,), ("n", "size")),
    "scales": Buffer((torch.float32,), ("n", "size"), per=GROUP),
}
_BASE: dict[str, Any] = {**VALUES, **FORMAT, **PARTS, "scale": float}
_WEIGHTS: dict[str, Any] = {"residual_decay": float, "error_weight": float}


def _fused_function(name: str, **state: Any) -> Function:
    return Function("quantize_feedback", name, "n", **_BASE, **state)


_with_residual = _fused_function("quantize_with_residual", **_WEIGHTS, **_STORED)
_with_residual_int8 = _fused_function("quantize_with_residual_int8", **_WEIGHTS, **_STORED_INT8)
_change = _fused_function("quantize_change", **_STORED)
_decode_change = _fused_function("dequantize_change", **_STORED)


class FeedbackPlan:
    """Calls for values of one dtype, fp32 or bf16, in groups of `size`, with a state stored as `store`."""

    def __init__(self, numel: int, size: int, grid: Grid, dtype: torch.dtype, store: torch.dtype):
        self.n = numel // size
        known = quantize.format_arguments(self.n, size, grid, dtype)
        if store == torch.int8:
            self.residual = _with_residual_int8.bind(**known)
        else:
            known["stored_bf16"] = store == torch.bfloat16
            self.residual = _with_residual.bind(**known)
            self.change, self.decode = _change.bind(**known), _decode_change.bind(**known)


_plan = lru_cache(FeedbackPlan)  # most messages have the shape of the one before


def quantize_with_residual(
    values: Tensor,
    residual: tuple[Tensor, ...],
    scale: float,
    residual_decay: float,
    error_weight: float,
    grid: Grid,
    size: int,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """See `reference.FusedFeedback`. The next residual overwrites the old one."""
    if not _is_fused(values.numel(), size, values.dtype, residual, grid):
        return reference.quantize_with_residual(
            values, residual, scale, residual_decay, error_weight, grid, size, out
        )
    plan = _plan(values.numel(), size, grid, values.dtype, residual[0].dtype)
    parts = out or quantize.empty_parts(plan.n, size, grid)
    stored = tuple(map(Tensor.contiguous, residual))
    plan.residual(values.contiguous(), *parts, scale, residual_decay, error_weight, *stored)
    return parts, stored


def quantize_change(
    values: Tensor, state: Tensor, scale: float, grid: Grid, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
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
