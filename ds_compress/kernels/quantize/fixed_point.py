"""Fixed-point codes between limits that a channel, or the whole tensor, has."""

import torch
from torch import Tensor

from ds_compress.kernels.memory import delivered
from ds_compress.kernels.numerics import as_divisor
from ds_compress.kernels.quantize.bits import pack, unpack


def encode_channels(
    x: Tensor, bits: int, size: int, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Codes of `x`, [rows, channels] of any float dtype, in steps of the largest magnitude of each channel
    over 2^(bits - 1), and that magnitude, fp32 [channels], or nan.

    Packed to uint8 [channels, size * bits / 8]: the last row stands again for what is missing to `size` rows,
    a multiple of 8. `out`: see `quantize`.
    """
    values = x.float()  # codes are made in the order in which it lies: they are moved then, not floats
    scale = values.abs().amax(0)
    scale = torch.where(scale.isfinite(), scale, torch.nan)  # inf times a code can look finite in fp16
    divisor = torch.where(scale > 0, scale * (1 + 1e-6), 1)
    half = 2 ** (bits - 1)
    codes = values.div(divisor).mul_(half).round_().clamp_(-half, half - 1).add_(half)
    codes = codes.nan_to_num_(0).to(torch.uint8).t().contiguous()
    if size > codes.shape[1]:
        codes = torch.cat([codes, codes[:, -1:].expand(-1, size - codes.shape[1])], dim=1)
    return delivered((pack(codes, bits), scale), out)


def decode_channels(packed: Tensor, scale: Tensor, bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The values, [rows, channels] of `dtype`, of what `encode_channels` returned."""
    half = 2 ** (bits - 1)
    codes = unpack(packed, bits)[:, :rows].t().contiguous()
    return codes.float().sub_(half).div_(half).mul_(scale).to(dtype)


def encode_range(x: Tensor, bits: int, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Codes of `x`, [1, size] of any float dtype, size a multiple of 8, in 2^bits - 1 steps from its smallest
    to its largest value, packed to uint8 [1, size * bits / 8]; and these two, fp32 [1, 2]. No row makes none.
    `out`: see `quantize`.
    """
    values, top = x.float(), 2**bits - 1
    # which of two zeros a reduction meets first depends on the processor
    low, high = (limit + 0.0 for limit in (values.amin(1, keepdim=True), values.amax(1, keepdim=True)))
    width = torch.where(high > low, high - low, 1)  # a constant tensor is all code 0
    codes = values.sub(low).mul_(top).div_(width).round_().clamp_(0, top)
    packed = pack(codes.nan_to_num_(0).to(torch.uint8), bits)
    return delivered((packed, torch.cat([low, high], dim=1)), out)


def decode_range(packed: Tensor, limits: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The values, [1, size] of `dtype`, of what `encode_range` returned."""
    low, high = limits.split(1, dim=1)
    values = unpack(packed, bits).float().mul_(high - low)
    return values.div_(as_divisor(2**bits - 1, values)).add_(low).to(dtype)
