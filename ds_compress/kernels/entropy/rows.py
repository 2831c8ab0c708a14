"""Rows of a common magnitude, in PyTorch: the specification.

One quantizer step for a whole message is too coarse for its small rows. On a pretrained model the gradient of
an attention sink is 30 times smaller than that of a median token, and meets activations hundreds of times
larger; a row that is decoded as zeros makes gradients behind an RMSNorm explode. So rows are multiplied by
powers of two before they are quantized, as in block floating point.

A row's level is the mean exponent of its values that are not 0, as biased in a float: the logarithm of their
geometric mean, which a few large channels hardly change. Rows more than `tolerance` octaves below the median
level are shifted up to it, but not beyond the largest magnitude of the message. Rows more than `LARGER`
octaves above it are shifted down to that, but their largest magnitude not below that of the median row, as a
level is low, too, where a row has small channels. A row of zeros is marked: it is decoded as zeros, whatever
its code says.
"""

import torch
from torch import Tensor

LARGER = 2
"""Octaves that a row may lie above the median row: most rows do not move."""

MOST = 126
"""Largest shift, in octaves."""

ZEROS = -128
"""What stands for the shift of a row of zeros."""


def shift_rows(x: Tensor, tolerance: int) -> tuple[Tensor, Tensor]:
    """Shift the rows of `x`, [rows, width] of any float dtype, to a common magnitude.

    Args:
        tolerance: octaves below the median within which rows stay.

    Returns:
        The rows, fp32 or bf16 as `x`, else fp32; and the octaves that each was shifted by, int8 [rows].
    """
    values = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    exponents = values.float().view(torch.int32) >> 23 & 255
    count, most = (values != 0).sum(1), exponents.amax(1)
    levels = exponents.sum(1) // count.clamp(min=1)
    below = _median(levels, count == 0) - levels
    above = (-below - LARGER).minimum(most - _median(most, count == 0)).clamp(min=0)
    shifts = torch.where(below > tolerance, below, 0).minimum(most.max() - most) - above
    shifts = torch.where(count == 0, 0, shifts.clamp(-MOST, MOST))
    shifted = values * _power_of_two(shifts).unsqueeze(1).to(values.dtype)
    return shifted, torch.where(count == 0, ZEROS, shifts).to(torch.int8)


def unshift_rows(y: Tensor, shifts: Tensor) -> Tensor:
    """Invert `shift_rows` on decoded rows `y`, [rows, width] in fp32 or bf16, in place; return `y`.

    A value that its step took beyond the range becomes the end of that.

    Args:
        shifts: int8 [rows], any bytes.
    """
    octaves = shifts.int().clamp(-MOST, MOST).unsqueeze(1)
    values, most = y.float(), torch.finfo(y.dtype).max * _power_of_two(octaves)
    scaled = torch.where(values.isfinite(), values.clamp(-most, most), values) * _power_of_two(-octaves)
    is_zero = (shifts == ZEROS).unsqueeze(1)
    return y.copy_(torch.where(is_zero, values - values, scaled))  # nan stays


def _median(levels: Tensor, leave_out: Tensor) -> Tensor:
    """Return the upper median of `levels` that are not left out, [1]; of none, any number."""
    ordered = torch.where(leave_out, -1, levels).sort().values
    left = leave_out.sum()
    middle = left + (len(levels) - left) // 2
    return ordered.index_select(0, middle.clamp(max=len(levels) - 1).view(1))


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents, fp32."""
    return (127 + exponents << 23).to(torch.int32).view(torch.float32)
