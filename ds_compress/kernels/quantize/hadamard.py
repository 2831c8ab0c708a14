"""The Walsh-Hadamard rotation with random signs, which spreads an outlier, or a mean, over its group."""

import hashlib
from functools import cache, lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.numerics import saturate


@cache
def key_of(seed: int) -> int:
    """Return the 31 bits from which both sides and every kernel draw the signs of `seed`."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little") >> 1


def largest_value(size: int) -> float:
    """Return the magnitude at which `rotate` cuts values off: 2^122 / size^1.5, so that no sum overflows.

    A coefficient is at most sqrt(size) times the largest value. The sums of `rotate_back` are at most size
    times the largest coefficient on the grid.
    """
    return 2.0 ** (122 - (3 * (size.bit_length() - 1) + 1) // 2)


def rotate(groups: Tensor, key: int) -> Tensor:
    """Rotate each row of `groups`, fp32 [n, G] with G a power of two.

    Values are multiplied by `diagonal`, then transformed: row i of the Walsh-Hadamard matrix, in natural
    order, is (-1)^popcount(i & j). Without the signs a mean would end up in one coefficient. Butterflies,
    nearest values first, rather than a product with that matrix, fix the order of summation: every kernel on
    every device gives the same bits.
    """
    size = groups.shape[1]
    return _butterflies(saturate(groups, largest_value(size)) * diagonal(size, key, groups.device))


def rotate_back(groups: Tensor, key: int) -> Tensor:
    """Invert `rotate`."""
    return _butterflies(groups) * diagonal(groups.shape[1], key, groups.device)


@lru_cache(maxsize=1024)
def cut_growth(size: int, values: int) -> float:
    """Return how many times as large the largest coefficient of a group can get when all but its first
    `values` values become 0: the norm of that projection in rotated coordinates."""
    kept = torch.arange(size, dtype=torch.int64, device="cpu")[None] < values
    return _butterflies(kept.float()).abs().sum().item() / size


def diagonal(size: int, key: int, device: torch.device) -> Tensor:
    """Return fp32 [size]: the square root of 1 / size with the sign of each value, equal for all groups."""
    # one per stream: another stream would not wait for the kernels that draw the signs
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _diagonal(size, key, device, stream)


@lru_cache(64)
def _diagonal(size: int, key: int, device: torch.device, stream: int) -> Tensor:
    """Draw the signs by hashing the places with Wellons' lowbias32, in 32 bits."""
    bits = torch.arange(size, dtype=torch.int64, device=device) + key
    bits = (bits ^ bits >> 16) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x846CA68B & 0xFFFFFFFF
    bits = (bits ^ bits >> 16) & 1
    return (1 - 2 * bits).float() * size**-0.5


def _butterflies(groups: Tensor) -> Tensor:
    n, size = groups.shape
    distance = 1
    while distance < size:
        first, second = groups.reshape(n, size // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack([first + second, first - second], dim=2).view(n, size)
        distance *= 2
    return groups
