"""Floats of fewer bits in PyTorch, those of 8 bits with a scale per group: the specification."""

import torch
from torch import Tensor

from ds_compress.kernels.memory import copy_into
from ds_compress.kernels.numerics import as_divisor, cast, saturate

__all__ = ["cast", "decode_fp8", "encode_fp8"]

LARGEST_REACH = 2.0**127
"""Values beyond it are cut off: the product of a code and its scale may be rounded up."""


def encode_fp8(
    values: Tensor, dtype: torch.dtype, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Encode `values`, [groups, size] of any float dtype.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        out: memory for the results; new memory if None.

    Returns:
        Codes, uint8 [groups, size]; scales, fp32 [groups].
    """
    values = values.float()
    largest = torch.finfo(dtype).max
    scales = saturate(values.abs().amax(1), LARGEST_REACH) / as_divisor(largest, values)
    # e4m3 has no inf: the scale of a group that is not finite makes all of its values nan
    scaled = values / torch.where(scales != 0, scales, 1)[:, None]
    return copy_into(out, (scaled.clamp_(-largest, largest).to(dtype).view(torch.uint8), scales))


def decode_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """Return the values, [groups, size] of dtype `out`, of `codes`, which are of `dtype`."""
    return codes.view(dtype).float().mul_(scales[:, None]).to(out)
