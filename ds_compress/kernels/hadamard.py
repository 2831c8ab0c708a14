"""The Walsh-Hadamard rotation, which spreads an outlier over its whole group."""

from functools import lru_cache

import torch
from torch import Tensor

RUN = 16


def rotate(groups: Tensor) -> Tensor:
    """Rotate each row of `groups`, fp32 [n, G] with G a power of two; the rotation is its own inverse.

    The transform is orthonormal, in natural order: row i of the matrix is (-1)^popcount(i & j) / sqrt(G). On a GPU one
    product with it takes the fewest launches. A CPU would spend most of the time multiplying: there H_G is factored
    into butterflies between runs of 16 values and a product with H_16 inside each run.
    """
    size = groups.shape[1]
    with torch.autocast(groups.device.type, enabled=False):  # which would multiply in 16 bits
        if groups.device.type != "cpu" or size <= RUN:
            return groups @ _matrix(size, size, groups.device)
        return inside_runs(between_runs(groups))


def between_runs(groups: Tensor) -> Tensor:
    """The butterflies between the runs of 16 values of each row, [n, G] with G a power of two above 16."""
    runs = list(groups.split(RUN, dim=1))
    distance = 1
    while distance < len(runs):
        pairs = [(runs[i], runs[i ^ distance]) for i in range(len(runs))]
        runs = [other - run if i & distance else run + other for i, (run, other) in enumerate(pairs)]
        distance *= 2
    return torch.cat(runs, dim=1)


def inside_runs(groups: Tensor) -> Tensor:
    """The product of each run of 16 values with H_16, and the scale of the whole transform."""
    matrix = _matrix(RUN, groups.shape[1], groups.device)
    return (groups.reshape(-1, RUN) @ matrix).view(groups.shape)


@lru_cache(maxsize=32)
def _matrix(size: int, whole: int, device: torch.device) -> Tensor:
    """Sylvester's matrix of `size`, times the scale that makes the one of size `whole` orthonormal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        top = torch.cat([matrix, matrix], dim=1)
        bottom = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([top, bottom])
    return (matrix * whole**-0.5).to(device)
