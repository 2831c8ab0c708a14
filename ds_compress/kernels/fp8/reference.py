"""8-bit floats, with a scale for each group."""

import torch
from torch import Tensor

from ds_compress.kernels.memory import delivered
from ds_compress.kernels.numerics import as_divisor


def encode_float8(
    values: Tensor, dtype: torch.dtype, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Codes, uint8 [groups, size], of `values`, [groups, size] of any float dtype, as `dtype`; and scales,
    fp32 [groups]. `out`: see `quantize`."""
    values = values.float()
    largest = torch.finfo(dtype).max
    scales = values.abs().amax(1) / as_divisor(largest, values)
    # e4m3 has no inf: a group that holds inf or nan shows it by its scale, which makes all of it nan
    scaled = values / torch.where(scales != 0, scales, 1)[:, None]
    return delivered((scaled.clamp_(-largest, largest).to(dtype).view(torch.uint8), scales), out)


def decode_float8(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The values, [groups, size] of `out`, of `codes`, which are of `dtype`."""
    return codes.view(dtype).float().mul_(scales[:, None]).to(out)
