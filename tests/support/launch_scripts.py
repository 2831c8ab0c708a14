"""Load the scripts of launch/ as modules, and read the runs that monitors wrote."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ds_compress.cli.runs import RecordedRun, read_runs

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """launch/`name`.py, its `main` not run."""
    spec = importlib.util.spec_from_file_location(
        "launch_" + name.replace("/", "_"), ROOT / "launch" / f"{name}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_run(path: Path) -> RecordedRun:
    """The only run at `path`."""
    (run,) = read_runs(path)
    return run
