"""Load the scripts of launch/ as modules; write and read runs as monitors do."""

import csv
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


def write_csv(folder: Path, name: str, rows: list[tuple[float, float]]) -> None:
    """Write one file as DeepSpeed's csv_monitor does: named after the label, a header at each start."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name.replace('/', '_')}.csv", "a+", newline="") as file:
        csv.writer(file).writerows([("step", name.split("/")[-1]), *rows])


def read_run(path: Path) -> RecordedRun:
    """The only run at `path`."""
    (run,) = read_runs(path)
    return run
