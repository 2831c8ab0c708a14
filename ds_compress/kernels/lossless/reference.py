"""The bytes of numbers, sorted by their place: the first ones of all numbers, then the second ones, ..."""

import torch
from torch import Tensor


def sort_bytes(x: Tensor) -> Tensor:
    """uint8 [bytes of `x`]; `x` is contiguous."""
    return torch.stack(x.view(-1, 1).view(torch.uint8).unbind(1)).view(-1)


def join_bytes(planes: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of `dtype` and `shape` whose sorted bytes, contiguous, `planes` are.

    Raises:
        ValueError, RuntimeError: there are fewer.
    """
    numel = torch.Size(shape).numel()
    return torch.stack(planes.view(dtype.itemsize, numel).unbind(0), dim=1).view(dtype).view(shape)
