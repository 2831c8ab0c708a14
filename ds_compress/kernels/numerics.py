"""Small pieces of arithmetic that codecs, feedbacks and kernels share."""

import math

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of messages of `dtype`: at least fp32, as bf16 would round residuals away."""
    return torch.promote_types(dtype, torch.float32)


def narrow(value: Tensor, x: Tensor) -> Tensor:
    """Convert `value` to x's dtype, saturated at its range; nan where `x` is not finite.

    The sum of a message and a residual can leave the range of fp16; what saturation cuts off stays in the
    residual.
    """
    limits = torch.finfo(x.dtype)
    # x - x is 0 or nan: asking isfinite() takes a CPU ten times as long
    return value.clamp(limits.min, limits.max).add_(x - x).to(x.dtype)


def is_finite(matrix: Tensor) -> Tensor:
    """Return whether `matrix` holds no inf and no nan, 0-dim bool; one pass without a large temporary."""
    return _limits(matrix).isfinite().all()


LARGEST_FACTOR = 2.0**104
"""What products with matrices cut a message off at: far enough below the range of fp32 for sums over 2^20
values."""

LARGEST_STATE = 2.0**104
"""The largest magnitude that a feedback keeps. What saturated codecs lose of a larger one would take
thousands of messages to make up for."""


def can_keep(state: Tensor) -> Tensor:
    """Return whether a feedback may keep `state`, 0-dim bool: no magnitude is above `LARGEST_STATE`, or
    nan."""
    return (_limits(state).abs() <= LARGEST_STATE).all()


def is_readable(x: Tensor) -> bool:
    """Return whether the host can read `x` at once; it would wait for the work of a device."""
    return x.is_cpu


def saturate(x: Tensor, most: float) -> Tensor:
    """Return `x` with finite values beyond -most .. most cut off; inf and nan stay.

    A CPU makes no copy of `x` if there are none.
    """
    if is_readable(x) and (_limits(x).abs() <= most).all():
        return x
    return torch.where(x.isinf(), x, x.clamp(-most, most))


def cast(x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return `x` in `dtype`; a finite value beyond its range becomes the largest of its sign.

    Args:
        out: memory for the result; new memory if None.
    """
    result = x.to(dtype) if out is None else out.copy_(x)
    is_exact = torch.promote_types(x.dtype, dtype) == dtype
    if is_exact or (is_readable(x) and is_finite(result)):
        return result
    most = torch.finfo(dtype).max
    if most < torch.finfo(x.dtype).max:
        result.copy_(saturate(x.to(wide(x.dtype)), most))  # bf16 does not have the largest fp16
    return result.masked_fill_(x.isnan(), math.nan)  # whose bits in a cast depend on the processor


def _limits(matrix: Tensor) -> Tensor:
    """Return the smallest and the largest value, [2]; empty if there is none."""
    return torch.stack(torch.aminmax(matrix)) if matrix.numel() else matrix.flatten()


def rows_within(matrix: Tensor, most: float) -> Tensor:
    """Return bool [n, 1]: the rows of `matrix` [n, G] without a magnitude above `most`, and without nan."""
    # one pass by aminmax takes a CPU longer than these two
    return (matrix.amin(1, keepdim=True) >= -most) & (matrix.amax(1, keepdim=True) <= most)


def as_divisor(number: float, x: Tensor) -> Tensor | float:
    """Return a divisor for x / number that rounds once on every device; `x` has a float dtype.

    On a GPU torch multiplies by the inverse of a number, which gives other last bits where that inverse is no
    float; it does divide by a tensor.
    """
    if x.is_cpu or math.frexp(number)[0] == 0.5:
        return number
    return torch.full((), number, dtype=x.dtype, device=x.device)
