"""Messages as matrices, and as groups of values that share a scale.

In a matrix the last dimension is the row (the hidden size of a transformer); all others count rows (samples,
positions). A vector is one row, a number is a 1 x 1 matrix.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Context, Layout, Parts, TensorSpec
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.numerics import cast, is_readable

FIRST = 8
"""Values that a CPU looks at first in a row that may be 0: few rows that are not begin with so many zeros."""

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor of `shape`."""
    columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), columns


def row_bits(rows: int) -> Layout:
    """Return the layout of the bits of `with_rows`; empty for no rows."""
    return (((-(-rows // 8),), torch.uint8),) if rows else ()


def zero_rows(x: Tensor) -> Tensor:
    """Return bool [rows]: the rows of `x` in which all values are 0."""
    rows = x.reshape(matrix_shape(tuple(x.shape)))
    if not is_readable(x):
        return rows.any(1).logical_not_()
    zero = rows[:, :FIRST].any(1).logical_not_()
    rest = zero.nonzero().view(-1)
    if 4 * len(rest) > len(rows) and rows.numel():  # a copy of them takes longer, as does any() of all
        return (rows.amax(1) == 0) & (rows.amin(1) == 0)
    zero[rest] = rows[rest].any(1).logical_not_()
    return zero


def set_to_zero(rows: Tensor, zero: Tensor) -> None:
    """Set those of the `rows`, [n, width], to 0 that `zero`, bool [n], has."""
    if is_readable(zero):
        rows.index_fill_(0, zero.nonzero().view(-1), 0)  # touches no others
    else:
        rows.masked_fill_(zero[:, None], 0)


def with_rows(parts: Parts, rows: Tensor | None, out: Parts | None = None) -> Parts:
    """Return `parts` and after them `rows`, bool [rows], as bits, unless that is None; in the last tensor of
    `out` if that is given."""
    if rows is None:
        return parts
    bits = kernels(rows.device).pack_bits(rows)
    return (*parts, out[-1].copy_(bits) if out else bits)


def clear_rows(y: Tensor, bits: Sequence[Tensor]) -> Tensor:
    """Set the rows of `y`, contiguous, to 0 that `with_rows` added as `bits`, none or one; return `y`."""
    if bits:
        rows = matrix_shape(tuple(y.shape))
        set_to_zero(y.view(rows), kernels(y.device).unpack_bits(bits[0], rows[0]))
    return y


def as_message(matrix: Tensor, spec: TensorSpec) -> Tensor:
    """Return `matrix` in the shape and dtype of `spec`, with finite values within its range.

    An approximation of numbers near 65504 can exceed that of fp16, and inf would look like an overflow of the
    model.
    """
    return cast(matrix, spec.dtype).view(spec.shape)


def boundary_noise(shape: tuple[int, int], ctx: Context) -> Tensor:
    """Return standard normal fp32 numbers on the CPU, equal for all messages, replicas and both sides."""
    fixed = dataclasses.replace(ctx, direction="forward", step=0, micro_batch=0, replica=0)
    return torch.randn(shape, generator=fixed.generator(), dtype=torch.float32, device="cpu")


GroupSize = Annotated[int, Field(ge=8, le=2**20, multiple_of=8)]
"""Runs of so many values of the flattened tensor; a message is padded to whole groups."""


def group_shape(spec: TensorSpec, group_size: int | str) -> tuple[int, int]:
    """Return (groups, values per group, a multiple of 8): no groups for a tensor without elements."""
    size = group_size if isinstance(group_size, int) else max(8, spec.numel + -spec.numel % 8)
    return -(-spec.numel // size), size


def split(x: Tensor, group_size: int | str, fill: Literal["last", "zeros"] = "last") -> Tensor:
    """Cut `x` into [groups, values per group].

    The last group is padded with the last value, which keeps the range, or with zeros, which keep the sum.
    """
    numel = x.numel()
    size = numel if isinstance(group_size, str) else group_size
    if numel and numel % size == 0 and size % 8 == 0:  # nothing is missing: most messages, without a spec
        return x.reshape(-1, size)
    groups, size = group_shape(TensorSpec.of(x), group_size)
    missing = groups * size - numel
    if missing:
        values = x.reshape(-1)
        more = values[-1:] if fill == "last" else values.new_zeros(1)
        x = torch.cat([values, more.expand(missing)])
    return x.reshape(groups, size)


def join(groups: Tensor, spec: TensorSpec) -> Tensor:
    """Invert `split`: return the tensor of `spec` from `groups`, in fp32 or in its dtype.

    A value that its grid rounded beyond the range of fp16 becomes the largest fp16; nan stays.
    """
    if spec.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        groups = groups.clamp(-largest, largest)
    if groups.dtype == spec.dtype and groups.numel() == spec.numel and groups.is_contiguous():
        return groups.view(spec.shape)  # as most messages
    values = groups.reshape(-1)[: spec.numel]
    return values.reshape(spec.shape).to(spec.dtype).contiguous()
