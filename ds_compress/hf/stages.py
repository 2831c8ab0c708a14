"""Which layers each stage gets."""

from collections.abc import Sequence
from functools import lru_cache

from ds_compress.errors import CompressionError, shown


def layers_per_stage(costs: Sequence[float], stages: int | Sequence[int]) -> list[int]:
    """How many layers each stage gets, one at least.

    Args:
        costs: of each layer; the first one's includes the embedding, the last one's the head.
        stages: their number, or how many layers each is to have.

    Raises:
        CompressionError: more stages than layers, or counts that do not add up.
    """
    if not isinstance(stages, int):
        given = list(stages)
        if min(given, default=0) < 1 or sum(given) != len(costs):
            raise CompressionError(
                f"stages: {shown(given)} is not allowed: should be the layers of each stage, 1 at least, "
                f"{len(costs)} together"
            )
        return given
    if not 1 <= stages <= len(costs):
        raise CompressionError(
            f"stages: {stages} is not allowed: the model has {len(costs)} layers, and each stage needs one"
        )
    return _balanced(tuple(costs), stages)


def _balanced(costs: tuple[float, ...], stages: int) -> list[int]:
    """Counts with the least cost of the costliest stage."""

    @lru_cache(None)
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (len(costs) - start,)
        choices = []
        for count in range(1, len(costs) - start - left + 2):
            rest, counts = best(start + count, left - 1)
            choices.append((max(rest, sum(costs[start : start + count])), (count, *counts)))
        return min(choices)

    return list(best(0, stages)[1])
