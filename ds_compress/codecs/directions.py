"""The strongest directions of a message, sent apart from the rest as the product of two thin factors.

The rows of a young model lie in a few directions: after 150 steps, 8 of 128 hold 99 % of their energy. A
quantizer whose step suits these is too coarse for all else. In a pretrained model, what all tokens have in
common is shrunk where small values become 0. The directions are found anew for each message, by power
iterations on some of its rows (as in PowerSGD, Vogels et al., arXiv 1905.13727), and travel with it: no state
is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_compress.codec import Layout
from ds_compress.codecs.lowrank import orthonormal
from ds_compress.codecs.shapes import LARGEST_FACTOR

ITERATIONS = 4  # of the power iteration
SAMPLE = 128
"""Rows that the directions are found from, at least, if there are so many."""
CODE_BITS = 7
"""Bits of the magnitude of a coefficient, in units of the scale of its row."""


def factors_layout(rank: int, rows: int, width: int) -> Layout:
    """Return the layout of the factors that `subtract_directions` returns."""
    return ((rows, rank), torch.int8), ((rows,), torch.int8), ((rank, width), torch.bfloat16)


def factors_bits(rank: int, rows: int, width: int) -> int:
    """Return the bits that the factors of `rank` directions, at least one, take."""
    return 8 * rows * (rank + 1) + 16 * rank * width


def subtract_directions(m: Tensor, rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Subtract from `m`, [rows, width] of any float dtype, its product with its strongest directions.

    Args:
        rank: directions, at most as many as rows and as columns.

    Returns:
        The rest, fp32 [rows, width], no longer than `m` up to the rounding of the basis; and the factors:
        coefficients in units of their row's scale, int8 [rows, rank], the scales' exponents of 2, int8
        [rows], and the basis, bf16 [rank, width]. Rows have scales of their own: an attention sink is a
        hundred times longer than other tokens, whose coefficients would be 0 in its units. The coefficients
        of a row that is not finite, or beyond the range of products, are 0, and its rest is the row.
    """
    m = m.float()
    sample = m[:: max(1, len(m) // SAMPLE)]
    largest = sample.abs().amax(1, keepdim=True)
    sample = torch.where(largest > 0, sample / largest, 0)  # all rows count alike
    products = sample @ sample.T
    mixture = products[:, :: max(1, len(sample) // rank)][:, :rank]  # of rows, for each direction
    for _ in range(ITERATIONS):
        mixture, _ = orthonormal(products @ mixture)
    directions, _ = orthonormal(sample.T @ mixture)
    basis = directions.T.to(torch.bfloat16).contiguous()
    coefficients = F.linear(m, basis.float())
    largest = coefficients.abs().amax(1, keepdim=True)
    fits = largest < LARGEST_FACTOR
    exponents = torch.frexp(torch.where(fits, largest, 0)).exponent.sub_(CODE_BITS).clamp_(-126, 126)
    codes = torch.where(fits, torch.ldexp(coefficients, -exponents), 0).round_().clamp_(-127, 127)
    rest = torch.addmm(m, torch.ldexp(codes, exponents), basis.float(), alpha=-1)
    return rest, (codes.to(torch.int8), exponents.to(torch.int8).view(-1), basis)


def add_directions(rest: Tensor, codes: Tensor, exponents: Tensor, basis: Tensor) -> Tensor:
    """Add to a decoded `rest`, fp32 [rows, width], in place, what `subtract_directions` took away; return it.

    `codes`, `exponents` and `basis` are the factors that it returned.
    """
    return rest.addmm_(torch.ldexp(codes.float(), exponents[:, None]), basis.float())
