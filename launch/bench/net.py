"""Train on two hosts with a throttled link between them, with DeepSpeed alone and with recipes: `make
bench-net`.

Needs root.

    python launch/bench/net.py [--recipes none quantize4 ...] [--slowdowns 2.5 5 | --mbit 50 100]
                               [--depths 1 2 3 auto] [--connections 1 4 auto] [--latencies 0 20 80]
                               [--loss 0 0.1 1] [--jitter 5] [--stages 2 | 4] [--steps 8] [--rounds 1]
                               [--out FOLDER]
    python launch/bench/net.py --replicas [--dtypes fp32 bf16] [--slowdowns 2.5 5] [--steps 8] [--out FOLDER]
    python launch/bench/net.py --replicas --mbit 200 [--latencies 80] [--loss 0 0.05] [--connections 1 16]
                               (in fp32; --dtypes and --rounds have no effect)

Two stages, one core each, in two network namespaces (two_hosts.sh), or four, two of them on each host: then
their passes sleep most of the time (sleeping_passes.py), as there are not enough cores. The links are the
machine's own and those on which DeepSpeed alone takes so many times its step on the machine's own, or those
of --mbit.
On each link every setting trains once in each of the rounds, in turn; OUT/rows.json holds one row per link,
recipe and depth, the round with the median step, plot.png the same as bars:

    latency_ms                  of the link, there and back; 0: whatever the machine has
    loss, jitter_ms             of the link: packets lost of every 100; most that a packet is later
    depth                       link.depth; depth_ran: the same, or what "auto" has chosen
    connections                 link.connections; DeepSpeed alone has 1; connections_ran: the same, or what
                                "auto" has chosen
    share_of_free_link          step of DeepSpeed alone on the unshaped link / step_s
    step_s                      median over the steps, the first ones left out
    step_over_stock_unshaped    step_s / that of DeepSpeed alone on the unshaped link
    step_over_stock_same_link   step_s / that of DeepSpeed alone on the same link
    wire_bytes                  per step, both directions, TCP and IP headers included; of "auto" with the
                                first three steps, which are uncompressed
    link_busy                   share of the step in which the busier direction of a shaped link transmits
    chosen                      what `"recipe": "auto"` has chosen
    predicted_step_s            what `ds-compress advise` says, from the times of DeepSpeed alone; of "auto"
                                what it said when it chose; without lost packets and jitter
    losses_equal_stock          whether all losses are bit-equal to those of DeepSpeed alone
    processor                   of this machine

`make docs` writes the tables and the plot of step times from results/links.json, a copy of rows.json.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ds_compress.cli.bench import measure_boundary
from ds_compress.codec import TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.planning.step_time import LinkSpeed, MessageCost, TransferPlan, Workload, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.net_replicas import DTYPES, bench_connections
from launch.bench.net_replicas import bench as bench_replicas
from launch.bench.net_report import link_of, plot, show
from launch.bench.net_runs import (
    BASELINE,
    HIDDEN,
    HOSTS,
    LAUNCH,
    MICRO_BATCHES,
    PAYLOAD,
    RECIPES,
    SEQ,
    STAGE_TIMES,
    WARM_UP,
    Runs,
    Wire,
    of_depths,
    settings,
    stage_times,
)
from launch.reproduce.run import processor

CHOSEN = " <- chosen"
BUSY = 0.5  # load average above which the numbers mean little


class Bench:
    """Collects one row per run, with the step time that `ds-compress advise` predicts."""

    def __init__(self, runs: Runs, rounds: int):
        self.runs = runs
        self.rounds = rounds
        self.spec = TensorSpec((runs.micro_batch, SEQ, HIDDEN), torch.float32)
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def profile(self) -> Workload:
        """Measure the compute times of DeepSpeed's stages, with timers around its instructions."""
        stages = stage_times(self.runs.train(BASELINE, Wire(), through=[STAGE_TIMES])["log"])
        # The step of the other stage waits for this one's last backward pass
        per_step = min(stage["step_ms"] for stage in stages) / 1e3
        forward, backward = (tuple(stage[f"{d}_ms"] / 1e3 for stage in stages) for d in DIRECTIONS)
        return Workload(forward, backward, MICRO_BATCHES, per_step)

    def plan(self, recipe: str, depth: int = 1) -> TransferPlan:
        raw = MessageCost(self.spec.nbytes)
        if recipe == BASELINE:
            return TransferPlan(raw, raw, eager=False)
        config = Config(settings(recipe, depth))
        traffic = {direction: own.cost for direction, own in measure_boundary(config, 0, self.spec).items()}
        return TransferPlan(**traffic, eager=config.block.link.mode == "eager", depth=depth)

    def add(
        self,
        recipe: str,
        wire: Wire,
        run: dict[str, Any],
        workload: Workload,
        depth: int | str = 1,
        connections: int | str = 1,
    ) -> None:
        """Add the row of `run`; on every link the rows of DeepSpeed alone come first."""
        if not self.rows:
            self.losses = run["losses"]
        unshaped = self.rows[0]["step_s"] if self.rows else run["step_s"]
        here = wire.name, wire.rtt_ms, wire.loss
        same = next((row["step_s"] for row in self.rows if link_of(row) == here), run["step_s"])
        ran = depth if isinstance(depth, int) else logged(run["log"], "depth")
        chosen, predicted = chosen_setting(run["log"])
        if predicted is None:
            predicted = predict(workload, self.plan(recipe, ran), self.networks(wire)).step
        row = {
            "link": wire.name,
            "latency_ms": wire.rtt_ms,
            "loss": wire.loss,
            "jitter_ms": wire.jitter_ms,
            "stages": self.runs.stages,
            "recipe": recipe,
            "chosen": chosen,
            "depth": depth,
            "depth_ran": ran,
            "connections": connections,
            "connections_ran": logged(run["log"], "connections") if connections == "auto" else connections,
            "step_s": run["step_s"],
            "step_over_stock_unshaped": run["step_s"] / unshaped,
            "share_of_free_link": unshaped / run["step_s"],
            "step_over_stock_same_link": run["step_s"] / same,
            "wire_bytes": round(sum(run["sent"])),
            "link_busy": 8 * max(run["sent"]) / (wire.mbit * 1e6) / run["step_s"] if wire.mbit else None,
            "predicted_step_s": predicted,
            "losses_equal_stock": run["losses"] == self.losses,
            "processor": processor(),
        }
        self.rows.append(row)
        print(
            f"{row['link']:>12} {wire.rtt_ms:3g} ms {wire.loss:3g} % lost {recipe:<14} depth {depth!s:<4} "
            f"connections {connections} {row['step_s']:.3f} s, predicted {predicted:.3f} s",
            flush=True,
        )

    def link(
        self,
        wire: Wire,
        recipes: Sequence[str],
        depths: Sequence[int | str],
        workload: Workload,
        connections: Sequence[int | str] = (1,),
    ) -> None:
        """Measure DeepSpeed alone and all recipes on a link, and write the rows at once."""
        settings: list[tuple[str, int | str, int | str]] = [(BASELINE, 1, 1)]
        settings += [(name, at, n) for name in recipes for at in of_depths(name, depths) for n in connections]
        rounds = [
            [self.runs.train(recipe, wire, at, connections=n) for recipe, at, n in settings]
            for _ in range(self.rounds)
        ]
        for (recipe, at, n), runs in zip(settings, zip(*rounds, strict=True), strict=True):
            in_order = sorted(runs, key=lambda run: run["step_s"])
            self.add(recipe, wire, in_order[len(runs) // 2], workload, at, n)
        (self.runs.out / "rows.json").write_text(json.dumps(self.rows, indent=2) + "\n")

    def slow_link(self, slowdown: float, workload: Workload) -> float:
        """Find the bandwidth, Mbit/s, at which DeepSpeed alone takes `slowdown` times its unthrottled
        step."""
        target = slowdown * self.rows[0]["step_s"]
        plan = self.plan(BASELINE)
        low, high = 0.1, 1e6
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            slower = predict(workload, plan, self.networks(Wire(middle))).step > target
            low, high = (middle, high) if slower else (low, middle)
        mbit = high
        for _ in range(3):
            mbit = float(f"{mbit:.3g}")
            run = self.runs.train(BASELINE, Wire(mbit))
            if abs(run["step_s"] / target - 1) < 0.03:
                return mbit
            # What the link adds to a step is proportional to the time of a bit
            added = run["step_s"] - self.rows[0]["step_s"]
            mbit *= max(added, 0.01 * target) / (target - self.rows[0]["step_s"])
        return float(f"{mbit:.3g}")

    def networks(self, wire: Wire) -> tuple[LinkSpeed, ...]:
        """Return the network of each boundary; the middle one is between the hosts."""
        bandwidth = wire.mbit * 1e6 / 8 * PAYLOAD if wire.mbit else float("inf")
        between = LinkSpeed(bandwidth, wire.rtt_ms / 2e3)
        middle = self.runs.stages // HOSTS - 1
        return tuple(between if b == middle else LinkSpeed() for b in range(self.runs.stages - 1))


def logged(log: list[str], option: str) -> int:
    """Read what a run with "auto" for an option of the link has chosen."""
    return next((int(found[1]) for line in log if (found := re.search(rf"link {option} (\d+)", line))), 1)


def chosen_setting(log: list[str]) -> tuple[str | None, float | None]:
    """The settings that `"recipe": "auto"` says that it has chosen, and the seconds of a step that it expects
    from them; none of a run that chose nothing."""
    row = next((line for line in log if line.endswith(CHOSEN)), None)
    if row is None:
        return None, None
    milliseconds, _, _, _, _, name = row.removesuffix(CHOSEN).split(maxsplit=5)
    return name, float(milliseconds) / 1e3


def number(word: str) -> int | str:
    """Parse a value of `--depths` or `--connections`."""
    return word if word == "auto" else int(word)


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
    links = parser.add_mutually_exclusive_group()
    links.add_argument(
        "--slowdowns",
        nargs="*",
        type=float,
        default=[2.5, 5.0],
        metavar="TIMES",
        help="of DeepSpeed alone, one link each (default: 2.5 5)",
    )
    links.add_argument("--mbit", nargs="+", type=float, help="bandwidths instead, each direction, Mbit/s")
    parser.add_argument(
        "--steps", type=int, default=8, help=f"in each run, the first {WARM_UP} left out (default: 8)"
    )
    parser.add_argument(
        "--depths",
        nargs="+",
        type=number,
        default=[1, "auto"],
        metavar="DEPTH",
        help="of the links of recipes that are not blocking: numbers, or auto (default: 1 and auto)",
    )
    parser.add_argument(
        "--latencies",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="MS",
        help="there and back, each with each slow link (default: 0, none added)",
    )
    parser.add_argument(
        "--loss",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="PERCENT",
        help="packets lost at random, each with each slow link and latency (default: 0)",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="MS",
        help="most that a packet of a slow link is later, at random (default: 0)",
    )
    parser.add_argument(
        "--connections",
        nargs="+",
        type=number,
        default=[1],
        metavar="N",
        help="link.connections of recipes on slow links: numbers, or auto (default: 1)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each link (default: 1)")
    parser.add_argument(
        "--replicas", action="store_true", help="two replicas of one stage, one on each host, in no pipeline"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of replicas (default: fp32 and bf16)"
    )
    parser.add_argument("--stages", type=int, choices=(HOSTS, 2 * HOSTS), default=HOSTS)
    parser.add_argument(
        "--micro-batch",
        type=int,
        help="samples (default: 24, messages of 3 MiB; 4 with four stages, 512 KiB)",
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
    if args.replicas and args.mbit:
        places = product(args.mbit, args.latencies, args.loss)
        wires = [Wire(mbit, latency, loss, args.jitter) for mbit, latency, loss in places]
        bench_connections(out, args.steps, args.micro_batch or 24, wires, args.connections)
        return
    if args.replicas:
        bench_replicas(out, args.steps, args.micro_batch or 24, args.slowdowns, args.dtypes)
        return
    micro_batch = args.micro_batch or (24 if args.stages == HOSTS else 4)
    runs = Runs(out, args.steps, micro_batch, args.stages)
    bench = Bench(runs, args.rounds)
    workload = bench.profile()
    bench.link(Wire(), args.recipes, [1], workload)
    bandwidths = args.mbit or (bench.slow_link(slowdown, workload) for slowdown in args.slowdowns)
    for mbit, latency, loss in product(bandwidths, args.latencies, args.loss):
        wire = Wire(mbit, latency, loss, args.jitter)
        bench.link(wire, args.recipes, args.depths, workload, args.connections)
    show(bench.rows)
    plot(bench.rows, out / "plot.png")
    print(f"wrote {out / 'rows.json'} and plot.png")


if __name__ == "__main__":
    main()
