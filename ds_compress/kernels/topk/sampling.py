"""Which entries of a long row to look at first."""

import math
from functools import lru_cache

SAMPLE = 1 << 14
"""Entries of a sample, at least."""


def plan(d: int, k: int, least: int | None = None) -> tuple[int, int, int]:
    """(stride, high, low): which entries of a row of d to sample, every stride-th, and the ranks, 1 for the
    largest, of two of them between which the k-th largest of the row almost surely lies.

    The number of sampled entries among the k largest is about Poisson, and the ranks reach three of its
    standard deviations to each side. The stride shares no factor with d, hence none with the width of the
    last dimension: one that did would see only some of the channels, and outlier channels are common.

    Args:
        least: entries of the sample, in place of SAMPLE.
    """
    stride = max(1, d // (least or SAMPLE))
    while math.gcd(stride, d) > 1:
        stride += 1
    length = -(-d // stride)
    expected = k * length / d
    margin = 3 * math.sqrt(expected) + 1
    return stride, max(1, int(expected - margin)), min(length, math.ceil(expected + margin))


@lru_cache(maxsize=1024)  # a message has the shape of the one before
def first_look(d: int, k: int) -> tuple[int, int, int]:
    """`plan` of a sample that only tells where to look for the k-th largest first: of so few entries that to
    rank them takes no longer than what it spares, four of them among the k largest."""
    return plan(d, k, min(SAMPLE, max(min(d // 16, 1 << 10), d // 64, 4 * d // k)))
