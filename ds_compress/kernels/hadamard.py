"""The Walsh-Hadamard rotation, which spreads an outlier over its whole group."""

from functools import lru_cache

import torch
from torch import Tensor


def rotate(groups: Tensor) -> Tensor:
    """Rotate each row of `groups`, fp32 [n, G] with G a power of two; the rotation is its own inverse.

    The transform is orthonormal, in natural order: row i of the matrix is (-1)^popcount(i & j) / sqrt(G). One product
    with it beats log2(G) passes of butterflies in plain torch up to G = 128, on a GPU by the number of launches too.
    """
    with torch.autocast(groups.device.type, enabled=False):  # which would multiply in 16 bits
        return groups @ _matrix(groups.shape[1], groups.device)


@lru_cache(maxsize=32)
def _matrix(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        top = torch.cat([matrix, matrix], dim=1)
        bottom = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([top, bottom])
    return (matrix * size**-0.5).to(device)
