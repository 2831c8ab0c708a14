"""Two hosts and a slow link: the same training with DeepSpeed alone and with recipes. `make bench-net`; needs
root.

    python launch/bench/net.py [--recipes none quantize4 ...] [--slowdowns 2.5 5] [--steps 8] [--out
    runs/bench-net]

Two stages, one core each, in two network namespaces (two_hosts.sh). The links are the machine's own and those
on which DeepSpeed alone takes so many times its step on the machine's own. OUT/rows.json holds one row per
link and recipe, plot.png the same as bars:

    step_s                      median over the steps, the first ones left out
    step_over_stock_unshaped    step_s / that of DeepSpeed alone on the unshaped link
    step_over_stock_same_link   step_s / that of DeepSpeed alone on the same link
    wire_bytes                  per step, both directions, TCP and IP headers included
    link_busy                   share of the step in which the busier direction of a shaped link transmits
    predicted_step_s            what `ds-compress advise` says, from the times of DeepSpeed alone
    losses_equal_stock          whether all losses are bit-equal to those of DeepSpeed alone
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.table import Table

from ds_compress.cli.advise import codec_seconds
from ds_compress.cli.check import message_sizes
from ds_compress.cli.console import console
from ds_compress.codec import TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.planning.step_time import Network, Plan, Traffic, Workload, predict

matplotlib.use("Agg")
from matplotlib import pyplot

LAUNCH = Path(__file__).resolve().parents[1]
STOCK = "stock"
MICRO_BATCHES = 8
SEQ, HIDDEN = 128, 256
ATTEMPTS = 3  # to make a run whose processes end in order
WARM_UP = 2  # steps; the first one is never sent ahead
PAYLOAD = 1448 / 1514  # of an Ethernet frame that holds TCP over IP
BUSY = 0.5  # load average above which the numbers mean little
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
}


class Bench:
    """All runs of one benchmark, with their files in `out`."""

    def __init__(self, out: Path, steps: int, micro_batch: int):
        self.out = out
        self.steps = steps
        self.micro_batch = micro_batch
        self.spec = TensorSpec((micro_batch, SEQ, HIDDEN), torch.float32)
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def train(self, recipe: str, mbit: float | None, script: str = "train_lm.py") -> dict[str, Any]:
        """Step time, losses, bytes a step that left each host, and the output of one run; `mbit`: of the
        link."""
        folder = self.out / f"{recipe}-{f'{mbit:g}mbit' if mbit else 'unshaped'}"
        shutil.rmtree(folder, ignore_errors=True)  # the CSV monitor appends to what it finds
        folder.mkdir(parents=True)
        config = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 1000000,
            "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        }
        if recipe != STOCK:
            config["ds_compress"] = RECIPES[recipe]
        (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
        words = [LAUNCH / "two_hosts.sh", LAUNCH / script]
        if script != "train_lm.py":
            words.append(LAUNCH / "train_lm.py")
        words += [
            "--stages",
            2,
            "--layers",
            2,
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
            log, succeeded = run(list(map(str, words)), folder, mbit)
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
        return {
            "step_s": statistics.median(read(folder / "csv" / "Train_Samples_step_ms.csv")[WARM_UP:]) / 1e3,
            "losses": read(folder / "csv" / "Train_Samples_train_loss.csv"),
            "sent": sent,
            "log": log,
        }

    def profile(self) -> Workload:
        """What the stages of DeepSpeed alone compute, from a run with timers around its instructions."""
        stages = stage_times(self.train(STOCK, None, "stage_times.py")["log"])
        # The step of the other stage waits for this one's last backward pass
        per_step = min(stage["step_ms"] for stage in stages) / 1e3
        forward, backward = (tuple(stage[f"{d}_ms"] / 1e3 for stage in stages) for d in DIRECTIONS)
        return Workload(forward, backward, MICRO_BATCHES, per_step)

    def plan(self, recipe: str) -> Plan:
        raw = Traffic(self.spec.nbytes)
        if recipe == STOCK:
            return Plan(raw, raw, eager=False)
        config = Config(RECIPES[recipe])
        sizes = {row["direction"]: row["wire_bytes"] for row in message_sizes(config, 2, self.spec)}
        codecs = config.codecs(0)
        traffic = {
            d: Traffic(sizes[d], *codec_seconds(getattr(codecs, d), self.spec, "cpu")) for d in DIRECTIONS
        }
        return Plan(**traffic, eager=config.block.link.mode == "eager")

    def add(self, recipe: str, mbit: float | None, run: dict[str, Any], workload: Workload) -> None:
        """A row for `run`; those of DeepSpeed alone come first on every link."""
        if not self.rows:
            self.losses = run["losses"]
        unshaped = self.rows[0]["step_s"] if self.rows else run["step_s"]
        same = next((row["step_s"] for row in self.rows if row["link"] == link_name(mbit)), run["step_s"])
        predicted = predict(workload, self.plan(recipe), network(mbit)).step
        row = {
            "link": link_name(mbit),
            "recipe": recipe,
            "step_s": run["step_s"],
            "step_over_stock_unshaped": run["step_s"] / unshaped,
            "step_over_stock_same_link": run["step_s"] / same,
            "wire_bytes": round(sum(run["sent"])),
            "link_busy": 8 * max(run["sent"]) / (mbit * 1e6) / run["step_s"] if mbit else None,
            "predicted_step_s": predicted,
            "losses_equal_stock": run["losses"] == self.losses,
        }
        self.rows.append(row)
        print(
            f"{row['link']:>12} {recipe:<14} {row['step_s']:.3f} s, predicted {predicted:.3f} s", flush=True
        )

    def slow_link(self, slowdown: float, workload: Workload) -> tuple[float, dict[str, Any]]:
        """Mbit/s of the link on which DeepSpeed alone takes `slowdown` times its unshaped step, and that
        run."""
        target = slowdown * self.rows[0]["step_s"]
        plan = self.plan(STOCK)
        low, high = 0.1, 1e6
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            slower = predict(workload, plan, network(middle)).step > target
            low, high = (middle, high) if slower else (low, middle)
        mbit = high
        for _ in range(3):
            mbit = float(f"{mbit:.3g}")
            run = self.train(STOCK, mbit)
            if abs(run["step_s"] / target - 1) < 0.03:
                break
            # What the link adds to a step is proportional to the time of a bit
            added = run["step_s"] - self.rows[0]["step_s"]
            mbit *= max(added, 0.01 * target) / (target - self.rows[0]["step_s"])
        else:
            mbit = float(f"{mbit:.3g}")
            run = self.train(STOCK, mbit)
        return mbit, run


def run(words: list[str], folder: Path, mbit: float | None) -> tuple[list[str], bool]:
    """The output, by lines, of `words` on two hosts, and whether they succeeded."""
    environment = {
        **os.environ,
        "DEEPSPEED": str(Path(sys.executable).with_name("deepspeed")),
        "COUNTERS": str(folder / "counters"),
        "RATE": f"{mbit}mbit" if mbit else "",
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
    """What stage_times.py says on each stage. DeepSpeed's launcher turns buffers off: Python then writes the
    end of a line by itself, so the words of two stages can share a line."""
    found = (json.loads(words) for line in log for words in re.findall(r"stage_times (\{.*?\})", line))
    return sorted(found, key=lambda stage: stage["stage"])


def read(file: Path) -> list[float]:
    """The values in a file of DeepSpeed's CSV monitor."""
    with open(file, newline="") as lines:
        return [float(value) for samples, value in csv.reader(lines) if samples != "step"]


def network(mbit: float | None) -> Network:
    return Network(mbit * 1e6 / 8 * PAYLOAD) if mbit else Network()


def link_name(mbit: float | None) -> str:
    return f"{mbit:g} Mbit/s" if mbit else "unshaped"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "link",
        "recipe",
        "step, s",
        "/ unshaped",
        "/ stock here",
        "MB a step",
        "link busy",
        "predicted, s",
        "off by",
        title="2 stages, 8 micro-batches, one core a rank",
    )
    for row in rows:
        table.add_row(
            row["link"],
            row["recipe"],
            f"{row['step_s']:.3f}",
            f"{row['step_over_stock_unshaped']:.3f}",
            f"{row['step_over_stock_same_link']:.3f}",
            f"{row['wire_bytes'] / 1e6:.2f}",
            f"{100 * row['link_busy']:.0f} %" if row["link_busy"] else "",
            f"{row['predicted_step_s']:.3f}",
            f"{100 * (row['predicted_step_s'] / row['step_s'] - 1):+.0f} %",
        )
    console().print(table)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    links = list(dict.fromkeys(row["link"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(links), figsize=(4 * len(links), 4), squeeze=False, layout="constrained"
    )
    for axis, link in zip(axes[0], links):
        here = [row for row in rows if row["link"] == link]
        names = [row["recipe"] for row in here]
        axis.bar(names, [row["step_over_stock_unshaped"] for row in here], label="measured")
        predicted = [row["predicted_step_s"] / rows[0]["step_s"] for row in here]
        axis.plot(names, predicted, "k_", markersize=12, label="predicted")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(link)
        axis.tick_params(axis="x", rotation=60)
    axes[0][0].set_ylabel("step / DeepSpeed alone, unshaped")
    axes[0][0].legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=list(RECIPES),
        metavar="NAME",
        help=f"of {', '.join(RECIPES)} (default: all)",
    )
    parser.add_argument(
        "--slowdowns",
        nargs="*",
        type=float,
        default=[2.5, 5.0],
        metavar="TIMES",
        help="of DeepSpeed alone, one link each (default: 2.5 5)",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help=f"in each run, the first {WARM_UP} left out (default: 8)"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=24, help="samples (default: 24, messages of 3 MiB)"
    )
    parser.add_argument(
        "--out", type=Path, default=LAUNCH.parent / "runs" / "bench-net", help="default: runs/bench-net"
    )
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps: {args.steps} is not allowed: should be more than {WARM_UP}")
    if os.getloadavg()[0] > BUSY:
        print(
            f"bench_net: load average {os.getloadavg()[0]:.1f}: this machine is busy, the times will "
            "mean little"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that run() can clean up
    torch.set_num_threads(1)
    bench = Bench(args.out.resolve(), args.steps, args.micro_batch)
    workload = bench.profile()
    bench.add(STOCK, None, bench.train(STOCK, None), workload)
    for slowdown in [None, *args.slowdowns]:
        mbit = None
        if slowdown:
            mbit, stock = bench.slow_link(slowdown, workload)
            bench.add(STOCK, mbit, stock, workload)
        for recipe in args.recipes:
            bench.add(recipe, mbit, bench.train(recipe, mbit), workload)
        (bench.out / "rows.json").write_text(json.dumps(bench.rows, indent=2) + "\n")
    show(bench.rows)
    plot(bench.rows, bench.out / "plot.png")
    print(f"wrote {bench.out / 'rows.json'} and plot.png")


if __name__ == "__main__":
    main()
