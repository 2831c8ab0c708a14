"""Error bounds: the formulas from which codecs compute the errors that they declare.

All errors are relative, ||x - C(x)|| / ||x||.
"""

import functools
import math
from statistics import NormalDist

import torch


def rounding(wire: torch.dtype, message: torch.dtype) -> float:
    """Return the error of a cast of `message` to `wire`; 0 if `wire` holds all its values."""
    return 0.0 if torch.promote_types(wire, message) == wire else torch.finfo(wire).eps / 2


def largest_part(share: float, error: float) -> float:
    """Return the error if the largest values, a `share` of all, are sent with `error`, the others not."""
    return math.sqrt(1 - share * (1 - error**2)) if error < 1 else error


def random_part(share: float, error: float = 0.0) -> float:
    """Return the same for a random `share` of normal values, or of dimensions, with a margin for chance."""
    return math.sqrt((1 - share) * (1 + share / 2) + 1.2 * share * error**2)


def grid(values: int, steps: int) -> float:
    """Return the largest error of `values` numbers on a grid of `steps` from the smallest to the largest.

    Each is at most half a step off, and two of them make up the range.
    """
    return math.sqrt(values / 2) / steps


def largest_normal(values: int) -> float:
    """Return the magnitude that one of `values` standard normal numbers exceeds once in a hundred times."""
    return -NormalDist().inv_cdf(0.005 / values)


@functools.lru_cache(maxsize=1024)  # the reach may follow from the size of a message
def normal_on_grid(low: float, high: float, steps: int, stochastic: bool = False) -> float:
    """Return the error of standard normal numbers on a grid of `steps` from `low` to `high`.

    They are rounded to the nearest point, or at random to one of the two beside it (`stochastic`).
    """
    x = torch.linspace(-8, 8, 16001, dtype=torch.float64, device="cpu")
    weight = torch.exp(-x.square() / 2)
    step = (high - low) / steps
    position = ((x - low) / step).clamp(0, steps)
    if stochastic:
        inside = position - position.floor()
        squared = step**2 * inside * (1 - inside) + (x - low - step * position).square()
    else:
        squared = (x - low - step * position.round()).square()
    return math.sqrt((weight * squared).sum() / weight.sum())
