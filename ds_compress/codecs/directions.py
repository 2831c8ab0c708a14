"""The strongest directions of a message, sent apart from the rest as the product of two thin factors.

The rows of a young model lie in a few directions: after 150 steps, 8 of 128 hold 99 % of their energy. A
quantizer whose step suits these is too coarse for all else. In a pretrained model, what all tokens have in
common is shrunk where small values become 0. The directions are found anew for each message, by power
iterations on some of its rows (as in PowerSGD, Vogels et al., arXiv 1905.13727), and travel with it: no state
is kept.
"""

from typing import cast

import torch
from torch import Tensor

from ds_compress.codec import Layout
from ds_compress.codecs.lowrank import orthonormal
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.directions.factors import from_int8, to_int8

ITERATIONS = 4  # of the power iteration
SAMPLE = 128
"""Rows that the directions are found from, at least, if there are so many."""


def factors_layout(rank: int, rows: int, width: int) -> Layout:
    """Return the layout of the factors that `subtract_directions` returns."""
    codes = ((rows, rank), torch.int8), ((rows,), torch.int8)
    return *codes, ((rank, width), torch.int8), ((rank,), torch.int8)


def factors_bits(rank: int, rows: int, width: int) -> int:
    """Return the bits that the factors of `rank` directions, at least one, take."""
    return 8 * (rows * (rank + 1) + rank * (width + 1))


def most_directions(bits: float, rows: int, width: int) -> int:
    """Return the directions whose factors take at most `bits`; 0 or less if there is no room for one."""
    return int((bits / 8 - rows) // (rows + width + 1))


def subtract_directions(m: Tensor, rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Subtract from `m`, [rows, width] of any float dtype, its product with its strongest directions.

    Args:
        rank: directions, at most as many as rows and as columns.

    Returns:
        The rest [rows, width], bf16 of a bf16 `m`, otherwise fp32, no longer than `m` up to rounding; and the
        factors: coefficients, int8 [rows, rank], directions, int8 [rank, width], each followed by the
        exponents of 2 of the units of its rows, int8. Rows have units of their own: an attention sink is a
        hundred times longer than other tokens, whose coefficients would be 0 in its unit. The coefficients
        of a row that is not finite, or beyond the range of products, are 0, and its rest is the row.
    """
    basis, units = to_int8(_strongest(m[:: max(1, len(m) // SAMPLE)], rank))
    rounded = from_int8(basis, units)
    dual = rounded / rounded.square().sum(1, keepdim=True).clamp(min=0.5)  # a direction of zeros stays
    rest, codes, exponents = kernels(m.device).subtract_product(m, dual, rounded)
    return rest, (codes, exponents, basis, units)


def add_directions(rest: Tensor, codes: Tensor, exponents: Tensor, basis: Tensor, units: Tensor) -> Tensor:
    """Add to a decoded `rest`, [rows, width], in place, what `subtract_directions` took away; return it.

    The others are the factors that it returned.
    """
    return cast(Tensor, kernels(rest.device).add_product(rest, codes, exponents, from_int8(basis, units)))


def _strongest(sample: Tensor, rank: int) -> Tensor:
    """Return the `rank` strongest directions of the rows of a `sample`, fp32 orthonormal rows or zeros."""
    sample = sample.to(torch.float32, copy=True)
    largest = torch.maximum(sample.amax(1, keepdim=True), -sample.amin(1, keepdim=True))
    sample.div_(torch.where(largest > 0, largest, torch.inf)).nan_to_num_(0)  # all finite rows count alike
    products = sample @ sample.T
    mixture = products[:, :: max(1, len(sample) // rank)][:, :rank]  # of rows, for each direction
    for _ in range(ITERATIONS):
        mixture, _ = orthonormal(products @ mixture)
    directions, _ = orthonormal((mixture.T @ sample).T)
    return directions.T
