"""Choose few cases of each test: `make test` runs these, `make test-all` runs all."""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def with_every_value(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Choose as few cases of each test function as have every value of every parameter at least once.

    A cross product of parameters shrinks to about its longest axis ("each-choice" coverage). A test marked
    `extended` has no case here, one marked `extended(keep=3)` at most three.
    """
    functions: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.parent, getattr(item, "originalname", item.name)].append(item)
    return {item for cases in functions.values() for item in _limit(_cover(cases))}


def _cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Take the case with the most values not seen yet, the earliest of several, until all are seen."""
    values = {
        case: set(enumerate(case.callspec._idlist)) if hasattr(case, "callspec") else {0} for case in cases
    }
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def _limit(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Take as many cases as the marker `extended` keeps, evenly spread."""
    marker = cases[0].get_closest_marker("extended")
    keep = len(cases) if marker is None else min(len(cases), marker.kwargs.get("keep", 0))
    return [cases[index * len(cases) // keep] for index in range(keep)]
