"""Runs repeated as pipelines of four ranks through the deepspeed launcher: losses and bytes of `simulate`."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ds_compress.simulate import simulate, traffic
from launch.demo import deepspeed_launcher, total_bytes
from launch.reproduce.grid import append_row, is_row_of, read_rows
from launch.reproduce.run import Row, Run, surroundings, task_of, train
from launch.reproduce.task import STAGES

CPU = torch.device("cpu")


def compare(runs: list[Run], data: Path, results: Path) -> None:
    """Add a row for each of `runs` to results/launched.jsonl, unless it is there; say what came out."""
    file = results / "launched.jsonl"
    for run in runs:
        if any(is_row_of(row, run) for row in read_rows(file)):
            continue
        row = compared(run, data, results)
        append_row(file, row)
        what = "equal" if row["losses_equal"] and row["bytes_equal"] else "NOT equal"
        print(f"{run.task}/{run.setting} seed {run.seed}, on {STAGES} ranks: {what}", flush=True)


def compared(run: Run, data: Path, results: Path) -> Row:
    """Losses of all steps, and bytes, of a pipeline and of `simulate`."""
    torch.set_num_threads(1)
    task = task_of(run.preset, run.task, data, results / "cache")
    model = nn.Sequential(*task.stages(run.seed))
    model = simulate(model, {"ds_compress": run.block}, range(1, STAGES), task.steps_per_epoch)
    expected = train(model, task, run.seed, CPU)
    losses, raw, wire = pipeline(run, data, results, len(expected))
    sent = traffic(model)
    differing = [step for step, pair in enumerate(zip(losses, expected), 1) if pair[0] != pair[1]]
    bytes_equal = (raw, wire) == (sum(s.raw_bytes for s in sent), sum(s.wire_bytes for s in sent))
    return {
        **run.identity,
        "stages": STAGES,
        "steps": len(losses),
        "losses_equal": not differing and len(losses) == len(expected),
        "first_difference": differing[0] if differing else None,
        "raw_bytes": raw,
        "wire_bytes": wire,
        "bytes_equal": bytes_equal,
        **surroundings(CPU),
    }


def pipeline(run: Run, data: Path, results: Path, steps: int) -> tuple[list[float], int, int]:
    """Losses, and bytes before and after compression, of `run` on four ranks.

    Raises:
        SystemExit: the launcher failed.
    """
    folder = (
        results / "cache" / "launched" / f"{run.preset}-{run.task}-{run.setting.replace('/', '-')}-{run.seed}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("csv/*"), *folder.glob("losses.json")):
        old.unlink()  # DeepSpeed's monitor appends
    launcher, env = deepspeed_launcher(STAGES)
    env["DS_ACCELERATOR"] = "cpu"  # where arithmetic is the same to the last bit
    script = Path(__file__).with_name("rank.py")
    run_of = [run.preset, run.task, run.setting, str(run.seed)]
    command = [*launcher, str(script), "--run", *run_of, "--steps", str(steps)]
    command += [
        "--data",
        str(data.resolve()),
        "--results",
        str(results.resolve()),
        "--out",
        str(folder.resolve()),
    ]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / "train.log").write_text(done.stdout)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        sys.exit(
            f"{tail}\nreproduce: the launcher exited with {done.returncode}; all output: {folder}/train.log"
        )
    found = json.loads((folder / "losses.json").read_text())
    raw, wire = (total_bytes(folder / "csv", kind, found["samples"]) for kind in ("raw", "wire"))
    return found["losses"], raw, wire
