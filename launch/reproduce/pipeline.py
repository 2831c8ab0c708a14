"""Execute a run as a real pipeline of four ranks, through the deepspeed launcher.

Runs whose settings change while they train (policies) are made so: they decide from what a pipeline measures.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ds_compress.cli.runs import read_runs
from ds_compress.config import DIRECTIONS
from ds_compress.simulate import simulate
from launch.demo import deepspeed_launcher, total_bytes
from launch.reproduce.run import BITS, Row, Run, environment, evaluated, outcome
from launch.reproduce.task import STAGES, Task


class PipelineResult(NamedTuple):
    """The result of a run as a pipeline."""

    losses: list[float]
    bytes: tuple[int, int]  # of all messages, before and after compression
    folder: Path  # with the weights, the bytes and the settings of each rank


def executed(run: Run, task: Task, data: Path, results: Path, device: torch.device) -> Row:
    """The row of `run`, trained as a pipeline; its last weights are evaluated here, under the settings that
    were in force at the end. Errors are not measured.

    Raises:
        RuntimeError: the launcher failed.
    """
    started = time.perf_counter()
    found = pipeline(run, data, results, task.epochs * task.steps_per_epoch)
    ranks = [json.loads((found.folder / f"rank-{rank}.json").read_text()) for rank in range(STAGES)]
    stages = nn.Sequential(*task.stages(run.seed))
    weights = [torch.load(found.folder / f"rank-{rank}.pt") for rank in range(STAGES)]
    stages.load_state_dict({name: tensor for own in weights for name, tensor in own.items()})
    trained = {"policy": "constant", "boundaries": ranks[0]["adopted"], "warmup_steps": 0, "warmup_epochs": 0}
    chosen = {key: value for key, value in run.block.items() if key not in ("recipe", "quality")}
    block = {**chosen, **trained}
    model = simulate(stages.to(device), {"ds_compress": block}, range(1, STAGES), task.steps_per_epoch)
    numbers: Row = {}
    for direction in DIRECTIONS:
        raw, wire = (sum(rank["sent"][direction][kind] for rank in ranks) for kind in ("raw", "wire"))
        numbers[f"bits_{direction}"] = round(BITS * wire / raw, 4)
        numbers |= {f"error_{direction}": None, f"token_error_{direction}": None}
    return {
        **run.identity,
        **outcome(found.losses, task),
        **numbers,
        "gradient_error": None,
        "warnings": None,
        "raw_bytes": found.bytes[0],
        "wire_bytes": found.bytes[1],
        **evaluated(model, task, device),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(device),
    }


def pipeline(run: Run, data: Path, results: Path, steps: int) -> PipelineResult:
    """Train `run` on four ranks and return its result.

    Raises:
        RuntimeError: the launcher failed.
    """
    folder = (
        results / "cache" / "launched" / f"{run.preset}-{run.task}-{run.setting.replace('/', '-')}-{run.seed}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("csv/*"), *folder.glob("*.json"), *folder.glob("*.pt")):
        old.unlink()  # DeepSpeed's monitor appends
    script = Path(__file__).with_name("rank.py")
    run_of = [run.preset, run.task, run.setting, str(run.seed)]
    places = {"--data": data.resolve(), "--results": results.resolve(), "--out": folder.resolve()}
    arguments = ["--run", *run_of, "--block", json.dumps(run.block), "--steps", str(steps)]
    arguments += [str(part) for place in places.items() for part in place]
    with deepspeed_launcher(STAGES) as (launcher, env):
        env["DS_ACCELERATOR"] = "cpu"  # where arithmetic is the same to the last bit
        done = subprocess.run(
            [*launcher, str(script), *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    log = folder / "train.log"
    log.write_text(done.stdout)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise RuntimeError(f"{tail}\nthe launcher exited with {done.returncode}; all output: {log}")
    found = json.loads((folder / "losses.json").read_text())
    (recorded,) = read_runs(folder / "csv")
    raw, wire = (total_bytes(recorded, name, found["samples"]) for name in ("raw_bytes", "wire_bytes"))
    return PipelineResult(found["losses"], (raw, wire), folder)
