"""Small steps of selections and feedbacks, in numpy."""

import numpy as np
import torch
from torch import Tensor


def kth_largest(size: Tensor, k: int) -> Tensor:
    """See `reference.steps.kth_largest`."""
    place = size.shape[1] - k
    return torch.from_numpy(np.partition(size.numpy(), place, axis=1)[:, place : place + 1])


def count_true(mask: Tensor) -> Tensor:
    """See `reference.count_true`; torch counts along a dim ten times slower."""
    counts = [[np.count_nonzero(row)] for row in mask.numpy()]
    return torch.tensor(counts, dtype=torch.int64, device="cpu").view(-1, 1)


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """See `reference.choose`; to ask costs nothing here."""
    return first if condition else second
