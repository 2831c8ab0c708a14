"""A factor of a product: int8 codes, in units of each row's own."""

import torch
from torch import Tensor

from ds_compress.kernels.numerics import LARGEST_FACTOR

CODE_BITS = 7
"""Bits of the magnitudes of codes."""


def to_int8(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 `m` [rows, n] in units of its rows, int8 [rows, n], and the exponents of 2 of these units,
    int8 [rows]. Rows that are not finite, or beyond the range of products, become 0."""
    largest = m.abs().amax(1, keepdim=True)
    fits = largest < LARGEST_FACTOR
    exponents = torch.frexp(torch.where(fits, largest, 0)).exponent.sub_(CODE_BITS).clamp_(-126, 126)
    codes = torch.where(fits, torch.ldexp(m, -exponents), 0).round_().clamp_(-127, 127)
    return codes.to(torch.int8), exponents.to(torch.int8).view(-1)


def from_int8(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return what `to_int8` was given, fp32 [rows, n], as far as int8 holds it."""
    return torch.ldexp(codes.float(), exponents[:, None])
