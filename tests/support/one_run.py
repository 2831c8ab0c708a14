"""A run read back from what monitors wrote."""

from pathlib import Path

from ds_compress.cli.runs import RecordedRun, read_runs


def read_run(path: Path) -> RecordedRun:
    """The only run at `path`."""
    (run,) = read_runs(path)
    return run
