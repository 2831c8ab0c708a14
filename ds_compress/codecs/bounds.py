"""How much of a message codecs lose: the pieces that their declared error bounds are made of.

All errors are relative, ||x - C(x)|| / ||x||.
"""

import functools
import math
from statistics import NormalDist

import torch


def rounding(wire: torch.dtype, message: torch.dtype) -> float:
    """The error of a cast of `message` to `wire`; 0 where `wire` holds all its values."""
    return 0.0 if torch.promote_types(wire, message) == wire else torch.finfo(wire).eps / 2


def largest_part(share: float, error: float) -> float:
    """The error where the largest values, a `share` of all, are sent with `error` and the others are not."""
    return math.sqrt(1 - share * (1 - error**2)) if error < 1 else error


def random_part(share: float, error: float = 0.0) -> float:
    """The same for a random `share` of normal values, or of their dimensions, with a margin for chance."""
    return math.sqrt((1 - share) * (1 + share / 2) + 1.2 * share * error**2)


def grid(values: int, steps: int) -> float:
    """The error of `values` numbers, whatever they are, on a grid of `steps` from their smallest to their
    largest.

    Each is at most half a step off, and two of them make up the range.
    """
    return math.sqrt(values / 2) / steps


def largest_normal(values: int) -> float:
    """A magnitude that one of `values` standard normal numbers exceeds once in a hundred times."""
    return -NormalDist().inv_cdf(0.005 / values)


@functools.cache
def normal_on_grid(low: float, high: float, steps: int, stochastic: bool = False) -> float:
    """The error of standard normal numbers on a grid of `steps` from `low` to `high`, rounded to the nearest
    point or `stochastic`ally to one of the two beside it."""
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
