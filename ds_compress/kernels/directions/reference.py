"""Products with directions in PyTorch: the specification, up to the rounding of sums, whose order is free."""

import torch
from torch import Tensor

from ds_compress.kernels.directions.factors import from_int8, to_int8

__all__ = ["add_product", "project", "set_projection", "subtract_product"]


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


def project(m: Tensor, onto: Tensor) -> Tensor:
    """Return how far each row of `m` reaches along its row of `onto`, both [rows, width] of any float dtypes:
    fp32 [rows]; of finite rows 0 along one that is 0 or not finite."""
    return torch.linalg.vecdot(m.float(), _of_length_one(onto))


def set_projection(m: Tensor, onto: Tensor, lengths: Tensor) -> Tensor:
    """Change `m`, fp32 or bf16 [rows, width], in place, along `onto` alone, so that `project` would return
    `lengths`, [rows] of any float dtype; return it. Rows whose length is not finite stay as they are."""
    values, units = m.float(), _of_length_one(onto)
    lacking = lengths.float() - torch.linalg.vecdot(values, units)
    lacking = torch.where(lacking.isfinite(), lacking, 0)
    return m.copy_(torch.addcmul(values, lacking[:, None], units))


def _of_length_one(rows: Tensor) -> Tensor:
    """Return the rows, scaled to a length of 1, fp32; 0 for those that are 0 or not finite."""
    values = rows.float()
    largest = values.abs().amax(1, keepdim=True)
    values = torch.where((largest > 0) & (largest < torch.inf), values / largest, 0)  # squares fit in fp32
    return values / values.norm(dim=1, keepdim=True).clamp(min=1)
