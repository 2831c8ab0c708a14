"""Byte shuffle in PyTorch, the specification: the first bytes of all numbers, then the second ones, and so
on."""

import torch
from torch import Tensor

__all__ = ["byte_shuffle", "byte_unshuffle"]


def byte_shuffle(x: Tensor) -> Tensor:
    """Return the shuffled bytes of `x`, uint8 [bytes]; `x` is contiguous."""
    return torch.stack(x.view(-1, 1).view(torch.uint8).unbind(1)).view(-1)


def byte_unshuffle(shuffled: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of `dtype` and `shape` whose bytes `shuffled` are; contiguous.

    Raises:
        ValueError, RuntimeError: there are fewer bytes.
    """
    numel = torch.Size(shape).numel()
    return torch.stack(shuffled.view(dtype.itemsize, numel).unbind(0), dim=1).view(dtype).view(shape)
