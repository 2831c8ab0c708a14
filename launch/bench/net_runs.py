"""Run trainings on two hosts, one after the other, for net.py."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_compress.cli.runs import read_series
from ds_compress.config import DIRECTIONS

LAUNCH = Path(__file__).resolve().parents[1]
BASELINE = "stock"
MICRO_BATCHES = 8
SEQ, HIDDEN = 128, 256
HOSTS = 2
STAGE_TIMES = str(LAUNCH / "bench" / "stage_times.py")
PAYLOAD = 1448 / 1514  # of an Ethernet frame that holds TCP over IP
PASS_MS = 40  # of a forward pass of stages that are asleep
ATTEMPTS = 3  # to make a run whose processes end in order
WARM_UP = 3  # steps: the first one is never sent ahead, and in the next two depth "auto" is found
RECIPES: dict[str, dict[str, Any]] = {
    "none-blocking": {"link": {"mode": "blocking"}},
    "none": {},
    "bf16": {"forward": {"codec": "bf16"}, "backward": {"codec": "bf16"}},
    **{
        f"quantize{bits}": {
            direction: {"codec": {"name": "quantize", "bits": bits}} for direction in DIRECTIONS
        }
        for bits in (8, 4, 2)
    },
    "topk10": {
        "forward": {"codec": {"name": "topk", "density": 0.1}},
        "backward": {"codec": {"name": "topk", "density": 0.1, "indices": "reuse"}},
    },
    **{quality: {"recipe": quality} for quality in ("safe", "balanced", "aggressive", "quant4")},
    **{f"auto-{quality}": {"recipe": "auto", "quality": quality} for quality in ("safe", "balanced")},
}


@dataclass(frozen=True)
class Wire:
    """The link between the hosts: bandwidth, round-trip time, lost packets and jitter."""

    mbit: float | None = None  # each direction; None: as fast as the machine
    rtt_ms: float = 0.0
    loss: float = 0.0  # packets of every 100, each direction
    jitter_ms: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.mbit:g} Mbit/s" if self.mbit else "unshaped"


def of_depths(recipe: str, depths: Sequence[int | str]) -> Sequence[int | str]:
    """Keep those of `depths` that a recipe supports: one if it ignores depth or chooses it."""
    block = RECIPES[recipe]
    if block.get("recipe") == "auto":
        return ["auto"]
    return [1] if block.get("link", {}).get("mode") == "blocking" else depths


def settings(recipe: str, depth: int | str, connections: int | str = 1) -> dict[str, Any]:
    """Return the "ds_compress" block of a recipe at a depth, with so many connections."""
    block = RECIPES[recipe]
    link = {**block.get("link", {}), "depth": depth}
    return {**block, "link": {**link, "connections": connections} if connections != 1 else link}


class Runs:
    """Trainings of so many steps, with their files in `out`; stages beyond one a host are asleep for most of
    their passes."""

    def __init__(self, out: Path, steps: int, micro_batch: int, stages: int):
        self.out = out
        self.steps = steps
        self.micro_batch = micro_batch
        self.stages = stages

    def train(
        self,
        recipe: str,
        wire: Wire,
        depth: int | str = 1,
        through: Sequence[str] = (),
        connections: int | str = 1,
    ) -> dict[str, Any]:
        """Step time, losses, bytes a step that left each host, and the output of one run, by a program that
        takes the training script and its arguments."""
        place = f"{wire.name.replace(' ', '').replace('/s', '').lower()}-{wire.rtt_ms:g}ms"
        if wire.loss or wire.jitter_ms:
            place += f"-loss-{wire.loss:g}-jitter-{wire.jitter_ms:g}ms"
        if connections != 1:
            place += f"-connections-{connections}"
        folder = self.out / f"{recipe}-depth-{depth}-{place}"
        shutil.rmtree(folder, ignore_errors=True)  # the CSV monitor appends to what it finds
        folder.mkdir(parents=True)
        config = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 1000000,
            "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        }
        if recipe != BASELINE:
            config["ds_compress"] = settings(recipe, depth, connections)
        (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
        words: list[Any] = [LAUNCH / "two_hosts.sh"]
        if self.stages > HOSTS:
            words.append(LAUNCH / "bench" / "sleeping_passes.py")
        words += [
            *through,
            LAUNCH / "train_lm.py",
            "--stages",
            self.stages,
            "--layers",
            self.stages,
            "--hidden",
            HIDDEN,
            "--seq",
            SEQ,
            "--steps",
            self.steps,
            "--deepspeed_config",
            folder / "ds_config.json",
        ]
        for attempt in range(ATTEMPTS):
            log, succeeded = run(list(map(str, words)), folder, wire, self.stages // HOSTS)
            if succeeded:
                break
            # gloo may abort a process that has done all its work, when a thread of it frees a tensor after
            # the end of the interpreter (seen with DeepSpeed alone, torch 2.13.0)
            if attempt + 1 == ATTEMPTS or not any("trained " in line for line in log):
                sys.exit(
                    "\n".join([*log[-20:], f"bench_net: {words[0]} failed; all output: {folder / 'log'}"])
                )
            shutil.rmtree(folder / "csv")
        sent = [int(line) / self.steps for line in (folder / "counters").read_text().split()]
        steps = [ms / 1e3 for ms in read(folder / "csv" / "Train_Samples_step_ms.csv")]
        return {
            "step_s": statistics.median(steps[WARM_UP:]),
            "steps_s": steps,
            "losses": read(folder / "csv" / "Train_Samples_train_loss.csv"),
            "sent": sent,
            "log": log,
        }


def run(words: list[str], folder: Path, wire: Wire, slots: int) -> tuple[list[str], bool]:
    """Run `words` on two hosts, `slots` ranks each; return the output lines and whether both succeeded."""
    environment = {
        **os.environ,
        "DEEPSPEED": str(Path(sys.executable).with_name("deepspeed")),
        "COUNTERS": str(folder / "counters"),
        "RATE": f"{wire.mbit}mbit" if wire.mbit else "",
        "RTT_MS": f"{wire.rtt_ms:g}",
        "LOSS": f"{wire.loss:g}",
        "JITTER_MS": f"{wire.jitter_ms:g}",
        "SLOTS": str(slots),
        "PASS_MS": str(PASS_MS),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(LAUNCH.parent), os.environ.get("PYTHONPATH")])),
    }
    log = folder / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)  # it takes its namespaces down
            process.wait()
            raise
    return log.read_text().splitlines(), process.returncode == 0


def stage_times(log: list[str]) -> list[dict[str, float]]:
    """What `stage_times.py` says on each stage. DeepSpeed's launcher turns buffers off: Python then
    writes the end of a line by itself, so the words of two stages can share a line."""
    found = (json.loads(words) for line in log for words in re.findall(r"stage_times (\{.*?\})", line))
    return sorted(found, key=lambda stage: stage["stage"])


def read(file: Path) -> list[float]:
    """Read the values of a file of DeepSpeed's CSV monitor."""
    return [value for _, value in read_series(file)]
