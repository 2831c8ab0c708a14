"""Small steps of selections and feedbacks, in torch; a CPU is faster in numpy."""

import torch
from torch import Tensor


def kth_largest(size: Tensor, k: int) -> Tensor:
    """[rows, 1]: the k-th largest of each row of `size` [rows, d]."""
    return size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)


def count_true(mask: Tensor) -> Tensor:
    """int64 [rows, 1]: how many entries of each row of `mask` [rows, d] are true."""
    return mask.count_nonzero(1).unsqueeze(1)


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` if `condition`, a bool of one element, is true, else `second`, of its shape and dtype; the host
    does not wait for it."""
    return torch.where(condition, first, second)
