"""Quantization of groups of values, one call per direction: the unit that a fused kernel replaces."""

import torch
from torch import Tensor

from ds_compress.kernels.affine import (
    from_codes,
    minmax_grid,
    symmetric_grid,
    symmetric_offset,
    to_codes,
    top_code,
)
from ds_compress.kernels.bits import pack, unpack
from ds_compress.kernels.hadamard import rotate
from ds_compress.kernels.numerics import narrow


def quantize(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """Quantize every row of `groups` on a grid of its own.

    Args:
        groups: [n, G] of any float dtype, G a multiple of 8, and a power of two for `hadamard`.
        bits: per code, 1 to 8. symmetric: a grid around 0, given by its step alone, instead of one from the
            smallest to the largest value.
        scale_dtype: of step and offset, float32 or bfloat16.
        hadamard: quantize the Walsh-Hadamard rotation of each row.
        generator: on the device of `groups`, to round stochastically; None rounds to nearest.

    Returns:
        packed uint8 [n, G * bits / 8], step [n], and unless symmetric offset [n].
    """
    groups = rotate(groups.float()) if hadamard else groups.float()
    if symmetric:
        scales = (symmetric_grid(_reach(groups, bits, unbiased=generator is not None), bits, scale_dtype),)
        offset = symmetric_offset(scales[0], bits)
    else:
        scales = minmax_grid(groups.amin(1), groups.amax(1), bits, scale_dtype)
        offset = scales[1]
    codes = to_codes(groups, scales[0], offset, top_code(bits, symmetric), generator)
    return pack(codes, bits), *scales


def quantize_with_error(
    groups: Tensor,
    residual: Tensor,
    factor: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """`quantize` of groups + factor * residual in the dtype of `groups`, and what of that sum is lost.

    Args:
        groups: [n, G], float32 or bfloat16.
        residual: fp32 [n, G], finite.
        factor: fp32, one element.

    Returns:
        what `quantize` returns; the error, fp32 [n, G].
    """
    total = groups.float() + residual * factor
    packed, step, *offset = quantize(narrow(total, groups), bits, symmetric, scale_dtype, hadamard)
    sent = dequantize(packed, step, offset[0] if offset else None, bits, hadamard, groups.dtype)
    return (packed, step, *offset), total - sent.float()


def dequantize(
    packed: Tensor,
    step: Tensor,
    offset: Tensor | None,
    bits: int,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values, [n, G] of `dtype`, of what `quantize` returned; `offset` is None for a symmetric grid."""
    if offset is None:
        offset = symmetric_offset(step, bits)
    groups = from_codes(unpack(packed, bits), step, offset)
    return (rotate(groups) if hadamard else groups).to(dtype)


def _reach(groups: Tensor, bits: int, unbiased: bool) -> Tensor:
    """The largest magnitude of each group, fp32 [n]. At 1 bit, unless dithered codes have to be `unbiased`,
    the mean magnitude: the one of least squared error when a value becomes -m or m (1-bit SGD, XNOR-Net)."""
    magnitude = groups.abs()
    return magnitude.mean(1) if bits == 1 and not unbiased else magnitude.amax(1)
