"""Make the table of the guard: which settings it warns of, and whether these hurt.

    python -m launch.reproduce.guard_table --data FOLDER [--tasks TASK ...] [--seed N]

A setting hurts in a task if training under it ends with a loss, evaluated uncompressed, that is more than
`HARM` above that of the uncompressed run. The guard warns if messages exceed its limits at its steps, or if
the last weights, evaluated compressed and not, differ by more than `guard.loss`.
"""

import argparse
import math
from pathlib import Path

from ds_compress.config import Config
from launch.reproduce.command import ROOT
from launch.reproduce.grid import execute_runs, is_row_of, missing, read_rows
from launch.reproduce.presets import PRESETS
from launch.reproduce.run import Row, Run
from launch.reproduce.settings import GRADIENTS

PRESET = "guard"
TASKS = tuple(PRESETS[PRESET])
HARM = 0.03  # what the class "aggressive" promises
UNBIASED = ("stochastic3", "stochastic2", "dither4", "dither2", "dither1")
ON_BOTH = ("group4/4-hadamard", "group3/3-hadamard", "entropy2.5/2.5", "columns3/stochastic2")
"""Settings that compress activations too."""

NAMES = ("none/group4", *GRADIENTS, *(f"none/{name}" for name in UNBIASED), *ON_BOTH)


def judge(row: Row, baseline: Row) -> tuple[float, bool]:
    """Return by how much a setting raises the loss, as a share, and whether the guard warns."""
    if row["diverged"] or row["perplexity_off"] is None:
        return math.inf, True
    uncompressed = math.log(baseline["perplexity_off"])
    cost = math.log(row["perplexity_off"]) / uncompressed - 1
    on, off = math.log(row["perplexity_on"]), math.log(row["perplexity_off"])
    return cost, bool(row["warnings"]) or abs(on - off) > Config({}).block.guard.loss * off


def table(rows: list[Row], runs: list[Run]) -> str:
    """Return the table in Markdown, cheapest settings first, and how many verdicts are wrong."""
    found = {run: row for run in runs for row in rows if is_row_of(row, run)}
    judged = []
    for run, row in found.items():
        baseline = found.get(run._replace(setting="none"))
        if run.setting != "none" and baseline is not None:
            judged.append((run, row, *judge(row, baseline)))
    lines = [
        "| task | setting | bits | error | gradient error | loss | the guard | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, row, cost, warns in sorted(judged, key=lambda each: each[2]):
        verdict = "right" if warns == (cost > HARM) else "**wrong**"
        errors = f"{row['error_backward'] or math.nan:.3f} | {row['gradient_error']:.3f}"
        bits = f"{row['bits_forward']:.2f} / {row['bits_backward']:.2f}"
        said = "warned" if warns else "silent"
        lines.append(
            f"| {run.task} | `{run.setting}` | {bits} | {errors} | {cost:+.1%} | {said} | {verdict} |"
        )
    wrong = sum(line.endswith("**wrong** |") for line in lines)
    return "\n".join([*lines, "", f"{wrong} of {len(judged)} verdicts are wrong."])


def main() -> None:
    parser = argparse.ArgumentParser(prog="guard_table", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with wikitext2/; needed to run anything")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default: results/")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    runs = [Run(PRESET, task, name, args.seed) for name in ("none", *NAMES) for task in args.tasks]
    file = args.results / f"{PRESET}.jsonl"
    for run, row in execute_runs(missing(runs, read_rows(file)), args.data, args.results, 1):
        if isinstance(row, str):
            raise SystemExit(f"guard_table: {run.task}/{run.setting}: {row}")
    print(table(read_rows(file), runs))


if __name__ == "__main__":
    main()
