"""Two hosts and a slow link, the same training with DeepSpeed alone and with recipes: `make bench-net`.

Needs root.

    python launch/bench/net.py [--recipes none quantize4 ...] [--slowdowns 2.5 5] [--steps 8] [--out FOLDER]

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
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ds_compress.cli.advise import codec_seconds
from ds_compress.cli.check import message_sizes
from ds_compress.codec import TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.planning.step_time import Network, Plan, Traffic, Workload, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.net_report import plot, show
from launch.bench.net_runs import (
    HIDDEN,
    LAUNCH,
    MICRO_BATCHES,
    RECIPES,
    SEQ,
    STOCK,
    WARM_UP,
    Runs,
    stage_times,
)

PAYLOAD = 1448 / 1514  # of an Ethernet frame that holds TCP over IP
BUSY = 0.5  # load average above which the numbers mean little


class Bench:
    """A row for each of the runs, and what `ds-compress advise` says to it."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.spec = TensorSpec((runs.micro_batch, SEQ, HIDDEN), torch.float32)
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def profile(self) -> Workload:
        """What the stages of DeepSpeed alone compute, from a run with timers around its instructions."""
        stages = stage_times(self.runs.train(STOCK, None, "stage_times.py")["log"])
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
        link = config.block.link
        return Plan(**traffic, eager=link.mode == "eager", depth=link.depth)

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
            run = self.runs.train(STOCK, mbit)
            if abs(run["step_s"] / target - 1) < 0.03:
                break
            # What the link adds to a step is proportional to the time of a bit
            added = run["step_s"] - self.rows[0]["step_s"]
            mbit *= max(added, 0.01 * target) / (target - self.rows[0]["step_s"])
        else:
            mbit = float(f"{mbit:.3g}")
            run = self.runs.train(STOCK, mbit)
        return mbit, run


def network(mbit: float | None) -> Network:
    return Network(mbit * 1e6 / 8 * PAYLOAD) if mbit else Network()


def link_name(mbit: float | None) -> str:
    return f"{mbit:g} Mbit/s" if mbit else "unshaped"


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
    out = args.out.resolve()
    runs = Runs(out, args.steps, args.micro_batch)
    bench = Bench(runs)
    workload = bench.profile()
    bench.add(STOCK, None, runs.train(STOCK, None), workload)
    for slowdown in [None, *args.slowdowns]:
        mbit = None
        if slowdown:
            mbit, stock = bench.slow_link(slowdown, workload)
            bench.add(STOCK, mbit, stock, workload)
        for recipe in args.recipes:
            bench.add(recipe, mbit, runs.train(recipe, mbit), workload)
        (out / "rows.json").write_text(json.dumps(bench.rows, indent=2) + "\n")
    show(bench.rows)
    plot(bench.rows, out / "plot.png")
    print(f"wrote {out / 'rows.json'} and plot.png")


if __name__ == "__main__":
    main()
