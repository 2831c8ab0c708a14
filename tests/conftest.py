import os
import shutil
from collections import defaultdict
from collections.abc import Iterable

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
        help="each: as few cases of a test as have every value of every parameter; rest: the others",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--cases")
    if wanted == "all":
        return
    each = choose_cases(items)
    kept = [item for item in items if (item in each) == (wanted == "each")]
    config.hook.pytest_deselected(items=[item for item in items if (item in each) != (wanted == "each")])
    items[:] = kept


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


def choose_cases(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Choose as few cases of each test function as have every value of every parameter at least once.

    What is marked `extended`, a test or a case, is left out; `extended(keep=3)` keeps at most three cases.
    """
    functions: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(mark.name == "extended" for mark in getattr(getattr(item, "callspec", None), "marks", ())):
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
