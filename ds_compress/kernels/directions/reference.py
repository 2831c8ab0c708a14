"""Products with directions in PyTorch: the specification, up to the rounding of sums, whose order is free."""

import torch
from torch import Tensor

from ds_compress.kernels.directions.factors import from_int8, to_int8

__all__ = ["add_product", "subtract_product"]


def subtract_product(m: Tensor, dual: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract from the rows of `m`, [rows, width] of any float dtype, what they have of some directions.

    Args:
        dual, basis: fp32 [rank, width], of at most 64 directions; the coefficients of a row are its products
            with `dual`, rounded to int8, and it has that much of the `basis`.

    Returns:
        The rest [rows, width], bf16 of a bf16 `m`, otherwise fp32; and the coefficients, int8 [rows, rank],
        and the exponents of 2 of their units, int8 [rows].
    """
    values = m.float()
    codes, exponents = to_int8(values @ dual.T)
    rest = torch.addmm(values, from_int8(codes, exponents).neg_(), basis)
    return rest.to(torch.bfloat16) if m.dtype == torch.bfloat16 else rest, codes, exponents


def add_product(rest: Tensor, codes: Tensor, exponents: Tensor, basis: Tensor) -> Tensor:
    """Add to `rest`, fp32 or bf16 [rows, width], in place, what `subtract_product` took away; return it."""
    return rest.copy_(torch.addmm(rest.float(), from_int8(codes, exponents), basis))
