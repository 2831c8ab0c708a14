"""What feedbacks do to a state and to a message: `reference` in C++ (feedback.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.feedback import compiled


def changed(x: Tensor, state: Tensor, factor: float) -> Tensor:
    """See `reference.changed`."""
    if _serves(state, x):
        return compiled.changed(x, state, factor)
    return reference.changed(x, state, factor)


def advanced(state: Tensor, change: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """See `reference.advanced`."""
    if _serves(state, change):
        return compiled.advanced(state, change, divisor)
    return reference.advanced(state, change, divisor)


def moved(state: Tensor, change: Tensor, divisor: float) -> Tensor:
    """See `reference.feedback.moved`."""
    return advanced(state, change, divisor)[0]


def finite(x: Tensor) -> Tensor:
    """See `reference.finite`."""
    known = x.dtype in compiled.FLOATS and native.serves("feedback", x.numel())
    return compiled.finite(x) if known else reference.finite(x)


def compensated(x: Tensor, residual: Tensor, factor: float, finite: Tensor) -> Tensor:
    """See `reference.compensated`; to ask costs nothing here."""
    if _serves(residual, x):
        return compiled.changed(x, residual, -(factor if finite else 0.0))  # with every sign as in a sum
    return reference.compensated(x, residual, factor, finite)


def renewed(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, share: float, rest: float
) -> tuple[Tensor, Tensor]:
    """See `reference.renewed`."""
    if _serves(residual, x) and sent.dtype == x.dtype:
        return compiled.renewed(x, residual, sent, scale, share, rest)
    return reference.renewed(x, residual, sent, scale, share, rest)


def encode_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.encode_int8`."""
    if _serves(value, value):
        return compiled.encode_int8(value)
    return reference.encode_int8(value)


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """See `reference.decode_int8`."""
    if native.serves("feedback", codes.numel()):
        return compiled.decode_int8(codes, scales)
    return reference.decode_int8(codes, scales)


def _serves(state: Tensor, message: Tensor) -> bool:
    known = state.dtype == torch.float32 and message.dtype in compiled.FLOATS
    return known and state.shape == message.shape and native.serves("feedback", state.numel())
