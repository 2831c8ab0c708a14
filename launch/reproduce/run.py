"""Execute one run: train a task under a setting, then evaluate the result with compression on and off."""

import dataclasses
import functools
import math
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_compress.simulate import SimulatedReplicas, Traffic, evaluating, simulate, traffic
from launch.reproduce.chosen import choose
from launch.reproduce.encoder import Encoder
from launch.reproduce.language import Language
from launch.reproduce.presets import PRESETS
from launch.reproduce.settings import SETTINGS, Block
from launch.reproduce.task import STAGES, Task
from launch.reproduce.training import train
from launch.reproduce.vision import Vision

KINDS: dict[str, Any] = {"vision": Vision, "language": Language, "encoder": Encoder}
PACKAGES = ("torch", "ds_compress", "deepspeed", "transformers")
ON_AND_OFF = {"on": "compressed", "off": "uncompressed"}
BITS = 32  # of a value that is not compressed: both tasks train in fp32

Row = dict[str, Any]


class Run(NamedTuple):
    """What identifies a row; everything in the row follows from these."""

    preset: str
    task: str
    setting: str
    seed: int

    @property
    def block(self) -> Block:
        """The "ds_compress" block of the setting."""
        return SETTINGS[self.task][self.setting]

    @property
    def identity(self) -> Row:
        """The columns that identify the row of this run, blocks and sizes included."""
        size = dataclasses.asdict(PRESETS[self.preset][self.task])
        return {**self._asdict(), "block": self.block, "size": size}


@functools.lru_cache(maxsize=2)
def task_of(preset: str, name: str, data: Path, cache: Path) -> Task:
    """Return the task with its data, which a process reads once."""
    size = PRESETS[preset][name]
    return KINDS[size.kind](size, data, cache)


def execute(run: Run, task: Task, device: torch.device) -> Row:
    """Execute `run` in `simulate` and return its row.

    A perplexity that is not finite is null. A run ends when its loss is not finite, and "diverged" is true.
    """
    started = time.perf_counter()
    block, columns = run.block, Row()
    if block.get("recipe") == "auto":
        choice = choose(block, task, run.seed, device)
        block, columns = choice.block, {"chosen": choice._asdict()}
    config = {"ds_compress": block}
    stages = nn.Sequential(*task.stages(run.seed)).to(device)
    count = getattr(PRESETS[run.preset][run.task], "replicas", 1)
    models = [
        simulate(stages, config, range(1, STAGES), task.steps_per_epoch, replica=replica)
        for replica in range(count)
    ]
    losses, replicas = train(models, config, task, run.seed, device)
    sent = traffic(models[0])  # before evaluation sends anything
    return {
        **run.identity,
        **columns,
        **outcome(losses, task),
        **traffic_columns(sent),
        **(replica_columns(replicas, stages, count) if count > 1 else {}),
        **evaluated(models[0], task, device),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(device),
    }


def evaluated(model: nn.Module, task: Task, device: torch.device) -> Row:
    """Evaluate the task with compression on and off; null if a value is not finite."""
    measured: Row = {}
    for name, messages in ON_AND_OFF.items():
        with torch.no_grad(), evaluating(model, messages):
            measured |= {f"{what}_{name}": value for what, value in task.evaluate(model, device).items()}
    return {what: value if math.isfinite(value) else None for what, value in measured.items()}


def outcome(losses: list[float], task: Task) -> Row:
    """Return the columns of training: steps, mean loss of the last epoch, whether it diverged."""
    last = losses[-task.steps_per_epoch :]
    diverged = not math.isfinite(last[-1])
    mean = None if diverged else sum(last) / len(last)
    return {"steps": len(losses), "train_loss": mean, "diverged": diverged}


def traffic_columns(sent: list[Traffic]) -> Row:
    """Return the columns of traffic: bytes, bits per value and errors of all boundaries in training."""
    row: Row = {}
    for direction in ("forward", "backward"):
        own = [each for each in sent if each.direction == direction]
        raw, wire = sum(s.raw_bytes for s in own), sum(s.wire_bytes for s in own)
        row[f"bits_{direction}"] = round(BITS * wire / raw, 4)
        for column in ("relative_error", "token_error"):
            error = sum(getattr(each, column) for each in own) / len(own)
            name = f"{column.removeprefix('relative_')}_{direction}"
            row[name] = round(error, 5) if math.isfinite(error) else None
    row["gradient_error"] = round(max(each.gradient_error for each in sent), 5)
    row["warnings"] = sorted({limit for each in sent for limit in each.warnings})
    row["raw_bytes"] = sum(s.raw_bytes for s in sent)
    row["wire_bytes"] = sum(s.wire_bytes for s in sent)
    return row


def replica_columns(replicas: SimulatedReplicas, stages: nn.Module, count: int) -> Row:
    """Return the bytes that a replica sent the others in training, small parameters included."""
    exact = sum(p.numel() for n, p in enumerate(stages.parameters()) if n not in replicas.compressed)
    steps = replicas.global_steps
    exact_bytes = steps * 2 * (count - 1) * exact * (BITS // 8) // count  # of a ring's all-reduce
    sent = [each.sent for each in replicas.exchanges[:1]]
    return {
        "replica_raw_bytes": exact_bytes + sum(each.raw_bytes for each in sent),
        "replica_wire_bytes": exact_bytes + sum(each.wire_bytes for each in sent),
    }


def environment(device: torch.device) -> Row:
    """Return the processor and the releases that a run used."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    return {"processor": name, "versions": versions}


def processor() -> str:
    """Return the processor's name as Linux reports it, else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, 1 of {os.cpu_count()} cores"


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
