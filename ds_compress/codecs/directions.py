"""The strongest directions of a message, sent apart from the rest as the product of two thin factors.

The rows of a young model lie in a few directions: after 150 steps, 8 of 128 hold 99 % of their energy. A
quantizer whose step suits these is too coarse for all else. In a pretrained model, what all tokens have in
common is shrunk where small values become 0. The directions are found anew for each message, by power
iterations on some of its rows (as in PowerSGD, Vogels et al., arXiv 1905.13727), and travel with it: no state
is kept.
"""

import torch
from torch import Tensor

from ds_compress.codec import Layout
from ds_compress.codecs.lowrank import orthonormal
from ds_compress.codecs.shapes import LARGEST_FACTOR

ITERATIONS = 4  # of the power iteration
SAMPLE = 128
"""Rows that the directions are found from, at least, if there are so many."""
CODE_BITS = 7
"""Bits of the magnitudes of coefficients and directions."""
CACHED = 1 << 16
"""Values that a CPU takes at a time: they stay in its cache from one product to the next."""


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
    basis, units = _to_int8(_strongest(m[:: max(1, len(m) // SAMPLE)].float(), rank))
    rounded, at_once = _from_int8(basis, units), _rows_at_once(m)
    dual = rounded / rounded.square().sum(1, keepdim=True).clamp(min=0.5)  # a direction of zeros stays
    products = torch.cat([dual @ rows.float().T for rows in m.split(at_once)], 1)
    codes, exponents = _to_int8(products.T.contiguous())
    coefficients = _from_int8(codes, exponents).neg_()
    rest = torch.empty_like(m, dtype=torch.bfloat16 if m.dtype == torch.bfloat16 else torch.float32)
    _add_product(m, coefficients, rounded, rest)
    return rest, (codes, exponents, basis, units)


def add_directions(rest: Tensor, codes: Tensor, exponents: Tensor, basis: Tensor, units: Tensor) -> Tensor:
    """Add to a decoded `rest`, [rows, width], in place, what `subtract_directions` took away; return it.

    The others are the factors that it returned.
    """
    _add_product(rest, _from_int8(codes, exponents), _from_int8(basis, units), rest)
    return rest


def _add_product(x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write `x` + `a` @ `b`, [rows, width], to `out` of any float dtype, which may be `x`."""
    at_once = _rows_at_once(x)
    for rows, own, place in zip(x.split(at_once), a.split(at_once), out.split(at_once), strict=True):
        place.copy_(torch.addmm(rows.float(), own, b, out=place if place.dtype == torch.float32 else None))


def _rows_at_once(m: Tensor) -> int:
    """Return the rows of `m` that are taken at a time."""
    return max(1, CACHED // m.shape[1]) if m.device.type == "cpu" else len(m)


def _strongest(sample: Tensor, rank: int) -> Tensor:
    """Return the `rank` strongest directions of the rows of an fp32 `sample`, orthonormal rows or zeros."""
    largest = sample.abs().amax(1, keepdim=True)
    sample = torch.where(largest > 0, sample / largest, 0)  # all rows count alike
    products = sample @ sample.T
    mixture = products[:, :: max(1, len(sample) // rank)][:, :rank]  # of rows, for each direction
    for _ in range(ITERATIONS):
        mixture, _ = orthonormal(products @ mixture)
    directions, _ = orthonormal((mixture.T @ sample).T)
    return directions.T


def _to_int8(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 `m` [rows, n] in units of its rows, int8 [rows, n], and the exponents of 2 of these units,
    int8 [rows]. Rows that are not finite, or beyond the range of products, become 0."""
    largest = m.abs().amax(1, keepdim=True)
    fits = largest < LARGEST_FACTOR
    exponents = torch.frexp(torch.where(fits, largest, 0)).exponent.sub_(CODE_BITS).clamp_(-126, 126)
    codes = torch.where(fits, torch.ldexp(m, -exponents), 0).round_().clamp_(-127, 127)
    return codes.to(torch.int8), exponents.to(torch.int8).view(-1)


def _from_int8(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return what `_to_int8` was given, fp32 [rows, n], as far as int8 holds it."""
    return torch.ldexp(codes.float(), exponents[:, None])
