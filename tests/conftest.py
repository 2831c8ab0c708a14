import os
import shutil

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from ds_compress.kernels import library
from tests.support import cases, ranks

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
    each = cases.with_every_value(items)
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
