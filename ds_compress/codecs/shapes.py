"""Messages as matrices, and as groups of values that share a scale.

In a matrix the last dimension is the row (the hidden size of a transformer); all others count rows (samples,
positions). A vector is one row, a number is a 1 x 1 matrix.
"""

import dataclasses
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from ds_compress.codec import Context, TensorSpec
from ds_compress.kernels.numerics import saturate

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor of `shape`."""
    columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), columns


def arithmetic_dtype(message: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """Return the message's dtype if the wire has it too, as the model would compute; else fp32."""
    return message if message == wire else torch.float32


def as_message(matrix: Tensor, spec: TensorSpec) -> Tensor:
    """Return `matrix` in the shape and dtype of `spec`, with finite values clamped to the range of fp16.

    An approximation of numbers near 65504 can exceed that, and inf would look like an overflow of the model.
    """
    if spec.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        matrix = torch.where(matrix.isfinite(), matrix.clamp(-largest, largest), matrix)
    return matrix.to(spec.dtype).view(spec.shape)


def boundary_noise(shape: tuple[int, int], ctx: Context) -> Tensor:
    """Return standard normal fp32 numbers on the CPU, equal for all messages, replicas and both sides."""
    fixed = dataclasses.replace(ctx, direction="forward", step=0, micro_batch=0, replica=0)
    return torch.randn(shape, generator=fixed.generator(), dtype=torch.float32, device="cpu")


LARGEST_FACTOR = 2.0**104
"""What products with matrices cut a message off at: far enough below the range of fp32 for sums over 2^20
values."""

LARGEST = 2**20  # a message is padded to whole groups, so groups beyond its size only cost


def _check_group_size(value: object) -> object:
    counted = type(value) is int and 0 < value <= LARGEST and value % 8 == 0
    if not counted and value not in ("tensor", "channel"):
        raise ValueError(f"is not allowed; allowed: 8, 16, ..., {LARGEST}, 'tensor', 'channel'")
    return value


GroupSize = Annotated[
    Annotated[int, Field(ge=8, le=LARGEST, multiple_of=8)] | Literal["tensor", "channel"],
    BeforeValidator(_check_group_size),
]
"""Runs of so many values of the flattened tensor; the whole tensor; or each index of the last dimension
(AQ-SGD)."""


Fill = Literal["last", "zeros", "mean"]


def group_shape(spec: TensorSpec, group_size: int | str) -> tuple[int, int]:
    """Return (groups, values per group): no groups for a tensor without elements, else a multiple of 8."""
    if not spec.numel:
        return 0, 8
    if group_size == "tensor":
        return 1, _round_up(spec.numel, 8)
    if group_size == "channel":
        channels = spec.shape[-1] if spec.shape else 1
        return channels, _round_up(spec.numel // channels, 8)
    size = int(group_size)
    return -(-spec.numel // size), size


def split(x: Tensor, group_size: int | str, axis: int = -1, fill: Fill = "last") -> Tensor:
    """Cut `x` into [groups, values per group], with dimension `axis` as the last.

    The last group is padded with the last value, which keeps the range; with zeros, which keep the sum; or
    with the mean magnitude of the group, which keeps that.
    """
    if axis != -1:
        x = x.movedim(axis, -1)
    numel = x.numel()
    run = numel if group_size == "tensor" else group_size
    if isinstance(run, int) and numel and numel % run == 0 and run % 8 == 0:  # nothing is missing
        return x.reshape(-1, run)
    shape = group_shape(TensorSpec.of(x), group_size)
    if not x.numel():
        return x.new_empty(shape)
    # torch transposes matrices in blocks, and tensors of more dimensions value by value
    rows = x.reshape(-1, shape[0]).t().contiguous() if group_size == "channel" else x.reshape(1, -1)
    missing = shape[0] * shape[1] // rows.shape[0] - rows.shape[1]
    if missing:
        more = rows[:, -1:]
        if fill == "zeros":
            more = torch.zeros_like(more)
        elif fill == "mean":
            own = rows[:, missing - shape[1] :]  # the values of the last group
            more = saturate(own.abs().float(), LARGEST_FACTOR).mean(1, keepdim=True).to(rows.dtype)
        rows = torch.cat([rows, more.expand(-1, missing)], dim=1)
    return rows.reshape(shape)


def join(groups: Tensor, spec: TensorSpec, group_size: int | str, axis: int = -1) -> Tensor:
    """Invert `split`: return the tensor of `spec` from `groups`, in fp32 or in its dtype.

    A value that its grid rounded beyond the range of fp16 becomes the largest fp16; nan stays.
    """
    if axis != -1:
        moved = join(groups, moved_spec(spec, axis), group_size)
        return moved.movedim(-1, axis).contiguous()
    if spec.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        groups = groups.clamp(-largest, largest)
    if group_size == "channel" and spec.numel:
        values = groups[:, : spec.numel // groups.shape[0]].contiguous().t().contiguous()
    else:
        if groups.dtype == spec.dtype and groups.numel() == spec.numel and groups.is_contiguous():
            return groups.view(spec.shape)  # nothing was missing
        values = groups.reshape(-1)[: spec.numel]
    return values.reshape(spec.shape).to(spec.dtype).contiguous()


def moved_spec(spec: TensorSpec, axis: int) -> TensorSpec:
    """Return `spec` with dimension `axis` moved to the end."""
    if axis == -1:
        return spec
    shape = [*spec.shape]
    shape.append(shape.pop(axis))
    return TensorSpec(tuple(shape), spec.dtype, spec.device)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
