import itertools
import os
import shutil
from collections import defaultdict
from collections.abc import Container, Iterable

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from ds_compress.kernels import library
from tests.support import ranks

# no verdict hangs on how busy the machine is
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

ranks.only_where_devices_are()


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        choices=("all", "each", "rest"),
        default="all",
        help="each: as few cases of a test as have every value of every parameter; rest: the others; "
        "all: as few as have every two values of two parameters",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--cases")
    each = choose_each(items)
    chosen = each if wanted == "each" else choose_pairs(items, each) - (each if wanted == "rest" else set())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_sessionstart(session):
    """Run no test without the kernels of these sources, where they can be compiled."""
    if not session.config.option.collectonly and library.load() is None and shutil.which("g++"):
        pytest.exit("the C++ kernels are missing or stale: run `python setup.py build_ext --inplace`", 2)


@pytest.fixture(scope="session", autouse=True)
def shared_files(tmp_path_factory):
    ranks.begin(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def choose_each(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Choose as few cases of each test function as have every value of every parameter at least once.

    What is marked `extended`, a test or a case, is left out; `extended(keep=3)` keeps at most three cases.
    """
    marked = {
        item
        for item in items
        if any(mark.name == "extended" for mark in getattr(getattr(item, "callspec", None), "marks", ()))
    }
    functions = _by_function(item for item in items if item not in marked)
    return {item for cases in functions for item in _limit(_cover(cases, 1))}


def choose_pairs(items: Iterable[pytest.Item], each: set[pytest.Item]) -> set[pytest.Item]:
    """Add to `each` what has every two values of two parameters together."""
    return {item for cases in _by_function(items) for item in _cover(cases, 2, each)}


def _by_function(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    functions: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.parent, getattr(item, "originalname", item.name)].append(item)
    return functions.values()


def _cover(cases: list[pytest.Item], together: int, first: Container[pytest.Item] = ()) -> list[pytest.Item]:
    """Take the case with the most not seen yet, the earliest of several, until all is seen.

    What is to be seen are the values of `together` parameters, or of all where a test has no more.
    """
    values = {case: _values(case, together) for case in cases}
    chosen = [case for case in cases if case in first]
    missing = set().union(*values.values()).difference(*map(values.get, chosen))
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def _values(case: pytest.Item, together: int) -> set[tuple[tuple[int, str], ...]]:
    given = list(enumerate(case.callspec._idlist)) if hasattr(case, "callspec") else []
    return set(itertools.combinations(given, min(together, len(given))))


def _limit(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Take as many cases as the marker `extended` keeps, evenly spread."""
    marker = cases[0].get_closest_marker("extended")
    keep = len(cases) if marker is None else min(len(cases), marker.kwargs.get("keep", 0))
    return [cases[index * len(cases) // keep] for index in range(keep)]
