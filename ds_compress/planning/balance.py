"""Balance the layers of a pipeline by the time that its stages were measured to take."""

from collections.abc import Sequence

UNEVEN = 0.15
"""Stages are uneven if their forward passes differ by more than this share of the shorter ones."""


def is_uneven(lower: Sequence[float], upper: Sequence[float]) -> bool:
    """Return whether three quarters of one stage's forward passes take longer, by more than `UNEVEN`, than
    three quarters of another's.

    Medians are not enough: beside other programs they differ by chance.

    Args:
        lower, upper: quartiles of the forward passes of each stage, in seconds.
    """
    return max(lower) > (1 + UNEVEN) * min(upper)


def balance_layers(seconds: Sequence[float], layers: Sequence[int]) -> list[int]:
    """Return how many layers each stage should get, at least one, so that the slowest stage is the fastest.

    A layer counts as much on a stage as the layers that the stage has now do on average. That is exact for
    unequal devices. What stays on a stage, an embedding or a head, makes the stage lose fewer layers than it
    should, so a second measurement may move more.

    Args:
        seconds: of a forward and a backward pass, by stage.
        layers: of each stage while that was measured, at least one.
    """
    costs = [each / count for each, count in zip(seconds, layers, strict=True)]
    counts = [1] * len(costs)
    for _ in range(sum(layers) - len(costs)):
        counts[min(range(len(costs)), key=lambda stage: (counts[stage] + 1) * costs[stage])] += 1
    return counts
