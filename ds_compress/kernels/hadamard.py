"""The Walsh-Hadamard rotation, which spreads an outlier over its whole group."""

from functools import lru_cache

import torch
from torch import Tensor


def rotate(groups: Tensor) -> Tensor:
    """Rotate each row of `groups`, fp32 [n, G] with G a power of two; the rotation is its own inverse.

    The transform is orthonormal, in natural order: row i of the matrix is (-1)^popcount(i & j) / sqrt(G). On a GPU one
    product with it takes the fewest launches. On a CPU its factors, the butterflies, come one by one, nearest values
    first, so that the order of summation, and with it every bit, does not depend on a library for matrices.
    """
    if groups.device.type != "cpu":
        with torch.autocast(groups.device.type, enabled=False):  # which would multiply in 16 bits
            return groups @ _matrix(groups.shape[1], groups.device)
    n, size = groups.shape
    distance = 1
    while distance < size:
        first, second = groups.reshape(n, size // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack([first + second, first - second], dim=2).view(n, size)
        distance *= 2
    return groups * size**-0.5


@lru_cache(maxsize=32)
def _matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix of `size`, orthonormal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        top = torch.cat([matrix, matrix], dim=1)
        bottom = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([top, bottom])
    return (matrix * size**-0.5).to(device)
