"""The bytes of numbers, sorted by their place: the first ones of all numbers, then the second ones, ...

Of tensors of the CPU, as what looks for repetition in them runs there.
"""

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.native import planes as compiled


def sort_bytes(x: Tensor) -> Tensor:
    """uint8 [bytes of `x`]; `x` is contiguous."""
    if x.dtype in compiled.FLOATS and native.serves("planes", x.numel()):
        return compiled.sort_bytes(x)
    return torch.stack(x.view(-1, 1).view(torch.uint8).unbind(1)).view(-1)


def join_bytes(planes: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of `dtype` and `shape` whose sorted bytes, contiguous, `planes` are.

    Raises:
        ValueError, RuntimeError: they are another number.
    """
    numel = torch.Size(shape).numel()
    if dtype in compiled.FLOATS and native.serves("planes", numel):
        return compiled.join_bytes(planes, dtype, shape)
    return torch.stack(planes.view(dtype.itemsize, numel).unbind(0), dim=1).view(dtype).view(shape)
