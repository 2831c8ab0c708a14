"""Run a grid of settings: skip runs that have a row, run the others in parallel."""

import json
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from ds_compress.errors import in_one_line
from launch.reproduce.pipeline import executed
from launch.reproduce.run import Row, Run, execute, task_of

DEVICE = torch.device("cpu")  # of this process


def read_rows(file: Path) -> list[Row]:
    """Read the rows of a file; ignore an incomplete last line."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_row(file: Path, row: Row) -> None:
    """Append a row in one write, after the last complete one."""
    whole = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    if whole[2]:
        file.write_text(whole[0] + whole[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as out:
        out.write(json.dumps(row, allow_nan=False) + "\n")


def is_row_of(row: Row, run: Run) -> bool:
    """Return whether `row` belongs to `run`: the same setting, block and sizes."""
    return all(row.get(key) == value for key, value in json.loads(json.dumps(run.identity)).items())


def missing(runs: Iterable[Run], rows: list[Row]) -> list[Run]:
    """Return the runs that have no row yet."""
    return [run for run in runs if not any(is_row_of(row, run) for row in rows)]


def execute_runs(runs: list[Run], data: Path, results: Path, jobs: int) -> Iterator[tuple[Run, Row | str]]:
    """Execute `runs`, `jobs` at a time, one per GPU or core; append each row to its file.

    Yields:
        A run that is done and its row, or in a line why it failed: the others go on.
    """
    cache = results / "cache"
    for name, preset in dict.fromkeys((run.task, run.preset) for run in runs):
        task_of(preset, name, data, cache).prepare()  # once, before others need it
    results.mkdir(parents=True, exist_ok=True)
    for run, row in _done(runs, data, cache, jobs):
        if not isinstance(row, str):
            append_row(results / f"{run.preset}.jsonl", row)
        yield run, row


def _done(runs: list[Run], data: Path, cache: Path, jobs: int) -> Iterator[tuple[Run, Row | str]]:
    """Yield runs and their results in the order in which they end."""
    if jobs == 1:
        _begin(*_devices(1))
        yield from ((run, _row(run, data, cache)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    devices = context.Queue()
    for device in _devices(jobs):
        devices.put(device)
    with ProcessPoolExecutor(jobs, context, _take, (devices,)) as pool:
        futures = {pool.submit(_row, run, data, cache): run for run in runs}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        finally:
            pool.shutdown(cancel_futures=True)


def _row(run: Run, data: Path, cache: Path) -> Row | str:
    try:
        task = task_of(run.preset, run.task, data, cache)
        if "policy" in run.block:
            return executed(run, task, data, cache.parent, DEVICE)
        return execute(run, task, DEVICE)
    except Exception as error:
        return in_one_line(error)


def _devices(jobs: int) -> list[str]:
    """Return a device for each of `jobs` processes."""
    gpus = torch.cuda.device_count()
    return [f"cuda:{job % gpus}" if gpus else "cpu" for job in range(jobs)]


def _take(devices: "multiprocessing.Queue[str]") -> None:
    _begin(devices.get())


def _begin(device: str) -> None:
    """Settle this process on a device; a run computes in one thread, so that its row does not depend on the
    number of cores."""
    global DEVICE
    DEVICE = torch.device(device)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(DEVICE.type == "cuda", warn_only=True)
