"""Repeat runs as pipelines of four ranks through the deepspeed launcher, and compare with `simulate`."""

import sys
from pathlib import Path

import torch
from torch import nn

from ds_compress.simulate import simulate, traffic
from launch.reproduce.grid import append_row, is_row_of, read_rows
from launch.reproduce.pipeline import pipeline
from launch.reproduce.run import Row, Run, environment, task_of
from launch.reproduce.task import STAGES
from launch.reproduce.training import train

CPU = torch.device("cpu")


def compare(runs: list[Run], data: Path, results: Path) -> None:
    """Add a row for each of `runs` to results/launched.jsonl, unless it exists, and print the outcome."""
    file = results / "launched.jsonl"
    for run in runs:
        if any(is_row_of(row, run) for row in read_rows(file)):
            continue
        try:
            row = compared(run, data, results)
        except RuntimeError as failed:
            sys.exit(f"reproduce: {run.task}/{run.setting} seed {run.seed}: {failed}")
        append_row(file, row)
        what = "equal" if row["losses_equal"] and row["bytes_equal"] else "NOT equal"
        print(f"{run.task}/{run.setting} seed {run.seed}, on {STAGES} ranks: {what}", flush=True)


def compared(run: Run, data: Path, results: Path) -> Row:
    """Compare losses of all steps and bytes of a pipeline with those of `simulate`."""
    torch.set_num_threads(1)
    task = task_of(run.preset, run.task, data, results / "cache")
    stages = nn.Sequential(*task.stages(run.seed))
    model = simulate(stages, {"ds_compress": run.block}, range(1, STAGES), task.steps_per_epoch)
    expected, _ = train([model], {}, task, run.seed, CPU)
    found = pipeline(run, data, results, len(expected))
    losses = found.losses
    sent = traffic(model)
    differing = [step for step, pair in enumerate(zip(losses, expected), 1) if pair[0] != pair[1]]
    bytes_equal = found.bytes == (sum(s.raw_bytes for s in sent), sum(s.wire_bytes for s in sent))
    return {
        **run.identity,
        "stages": STAGES,
        "steps": len(losses),
        "losses_equal": not differing and len(losses) == len(expected),
        "first_difference": differing[0] if differing else None,
        "raw_bytes": found.bytes[0],
        "wire_bytes": found.bytes[1],
        "bytes_equal": bytes_equal,
        **environment(CPU),
    }
