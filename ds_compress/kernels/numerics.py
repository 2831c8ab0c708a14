"""Small pieces of arithmetic that codecs, feedbacks and kernels share."""

import math

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up messages of `dtype` in: at least fp32, as bf16 sums lose what feedback is to
    keep."""
    return torch.promote_types(dtype, torch.float32)


def narrow(value: Tensor, x: Tensor) -> Tensor:
    """`value` in x's dtype, saturated at its range; nan where `x` is not finite.

    The sum of a message and a residual can leave the range of fp16; what saturation cuts off stays in the
    residual.
    """
    limits = torch.finfo(x.dtype)
    # x - x is 0 or nan: asking isfinite() takes a CPU ten times as long
    return value.clamp(limits.min, limits.max).add_(x - x).to(x.dtype)


def is_finite(matrix: Tensor) -> Tensor:
    """Return whether `matrix` holds no inf and no nan, 0-dim bool; one pass without a large temporary."""
    return _limits(matrix).isfinite().all()


def can_follow(state: Tensor) -> Tensor:
    """Find out whether messages can be changes to `state`: whether it is finite, also when it is narrowed to
    bf16, and so far below the range of fp32 that a change as large as it is can be encoded.

    Returns:
        0-dim bool.
    """
    return (4 * _limits(state)).isfinite().all()


def _limits(matrix: Tensor) -> Tensor:
    """Return the smallest and the largest value, [2]; empty if there is none."""
    return torch.stack(torch.aminmax(matrix)) if matrix.numel() else matrix.flatten()


def rows_finite(matrix: Tensor) -> Tensor:
    """bool [n, 1]: the rows of `matrix` [n, G] without inf and nan."""
    # one pass by aminmax takes a CPU longer than these two
    return matrix.amin(1, keepdim=True).isfinite() & matrix.amax(1, keepdim=True).isfinite()


def as_divisor(number: float, x: Tensor) -> Tensor | float:
    """What to divide `x`, of a float dtype, by for x / number, rounded once on every device.

    On a GPU torch multiplies by the inverse of a number, which gives other last bits where that inverse is no
    float; it does divide by a tensor.
    """
    if x.is_cpu or math.frexp(number)[0] == 0.5:
        return number
    return torch.full((), number, dtype=x.dtype, device=x.device)
