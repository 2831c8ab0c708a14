"""A message seen as a matrix: what the codecs that shorten its rows share.

The last dimension is the row (the hidden size of a transformer), all others count rows (samples, positions).
A vector is one row, a number is a 1 x 1 matrix.
"""

import dataclasses

import torch
from torch import Tensor

from ds_compress.codec import Context, TensorSpec

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of `shape`."""
    columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), columns


def arithmetic_dtype(message: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """The message's own dtype when the wire has it too, as its own layers would compute, else fp32: fp16
    overflows."""
    return message if message == wire else torch.float32


def as_message(matrix: Tensor, spec: TensorSpec) -> Tensor:
    """`matrix` in the shape and dtype of `spec`; in fp16 finite values beyond its range become its largest
    ones.

    An approximation of numbers near 65504 can pass it, and inf would be taken for an overflow of the model.
    """
    if spec.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        matrix = torch.where(matrix.isfinite(), matrix.clamp(-largest, largest), matrix)
    return matrix.to(spec.dtype).view(spec.shape)


def boundary_noise(shape: tuple[int, int], ctx: Context) -> Tensor:
    """Standard normal fp32 numbers on the CPU, the same for all messages, replicas and both sides of a
    boundary."""
    fixed = dataclasses.replace(ctx, direction="forward", step=0, micro_batch=0, replica=0)
    return torch.randn(shape, generator=fixed.generator(), dtype=torch.float32, device="cpu")
