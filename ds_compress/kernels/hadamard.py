"""The Walsh-Hadamard rotation, which spreads an outlier over its whole group."""

import torch
from torch import Tensor


def rotate(groups: Tensor) -> Tensor:
    """Rotate each row of `groups`, fp32 [n, G] with G a power of two; the rotation is its own inverse.

    The transform is orthonormal, in natural order: row i of its matrix is (-1)^popcount(i & j) / sqrt(G).
    Butterflies, nearest values first, rather than a product with that matrix, fix the order of summation:
    every kernel on every device gives the same bits.
    """
    n, size = groups.shape
    distance = 1
    while distance < size:
        first, second = groups.reshape(n, size // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack([first + second, first - second], dim=2).view(n, size)
        distance *= 2
    return groups * size**-0.5
