"""Measure the time until a loss is reached over a throttled link, with DeepSpeed alone and with recipes.

Needs root.

    python launch/bench/time_to_loss.py --mbit 60 [--recipes safe balanced auto-balanced] [--steps 200]

Two hosts as in net.py. The loss to reach is the lowest that every run has reached, means over 20 steps; all
train on the same text in the same order. OUT/rows.json holds a row for each run:

    seconds        from the first step on until the loss is reached, with the steps in which "auto" measures
    steps          the same
    times_faster   seconds of DeepSpeed alone / seconds
    last_loss      mean over the last 20 steps
    wire_bytes     until the loss is reached if all steps of the run had sent alike, both directions, TCP and
                   IP headers included
"""

import argparse
import json
import signal
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.cli.console import terminal_width
from launch.bench.net_runs import BASELINE, HOSTS, LAUNCH, RECIPES, Runs, Wire, of_depths

MEAN = 20  # steps


def means(losses: list[float]) -> list[float]:
    """Return the running mean of the last `MEAN` losses."""
    return [sum(losses[end - MEAN : end]) / MEAN for end in range(MEAN, len(losses) + 1)]


def reached(loss: float, run: dict[str, Any]) -> dict[str, Any]:
    """Return when a run first reached `loss` (nats per byte)."""
    steps = next(place for place, mean in enumerate(means(run["losses"]), MEAN) if mean <= loss)
    return {
        "seconds": [*accumulate(run["steps_s"])][steps - 1],
        "steps": steps,
        "last_loss": means(run["losses"])[-1],
        "wire_bytes": round(sum(run["sent"]) * steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, required=True, help="of the link, each direction, in Mbit/s")
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="MS", help="there and back (default: 0)"
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=["safe", "balanced", "auto-balanced"],
        metavar="NAME",
        help=f"of {', '.join(RECIPES)} (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=200, help="in each run (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=LAUNCH.parent / "runs" / "to-loss", help="default: runs/to-loss"
    )
    args = parser.parse_args()
    if args.steps < MEAN:
        parser.error(f"--steps: {args.steps} is not allowed: should be at least {MEAN}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs can clean up
    runs = Runs(args.out.resolve(), args.steps, args.micro_batch, HOSTS)
    wire = Wire(args.mbit, args.latency)
    done = {}
    for recipe in (BASELINE, *args.recipes):
        depth = 1 if recipe == BASELINE else of_depths(recipe, [1])[0]
        done[recipe] = runs.train(recipe, wire, depth)
        print(f"{recipe}: {sum(done[recipe]['steps_s']):.1f} s", flush=True)
    loss = max(min(means(run["losses"])) for run in done.values())
    rows = [
        {"link": wire.name, "latency_ms": wire.rtt_ms, "recipe": name, "loss": loss, **reached(loss, run)}
        for name, run in done.items()
    ]
    table = Table("recipe", "s", "steps", "times faster", "last loss", "MB sent", title=f"loss {loss:.3f}")
    for row in rows:
        row["times_faster"] = rows[0]["seconds"] / row["seconds"]
        table.add_row(
            row["recipe"],
            f"{row['seconds']:.1f}",
            str(row["steps"]),
            f"{row['times_faster']:.2f}",
            f"{row['last_loss']:.3f}",
            f"{row['wire_bytes'] / 1e6:.0f}",
        )
    Console(width=terminal_width()).print(table)
    (runs.out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(f"wrote {runs.out / 'rows.json'}")


if __name__ == "__main__":
    main()
