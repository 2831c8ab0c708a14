"""Parse the command line of `launch/reproduce.py` and run what it asks for."""

import argparse
import time
from pathlib import Path

from launch.reproduce.grid import execute_runs, missing, read_rows
from launch.reproduce.launched import compare
from launch.reproduce.page import write_page
from launch.reproduce.presets import PRESETS
from launch.reproduce.run import Row, Run
from launch.reproduce.settings import COMPARED, JUDGED, LAUNCHED, NONE, REPLICAS, SETTINGS

ROOT = Path(__file__).resolve().parents[2]
MEASURES = ("accuracy_on", "accuracy_off", "perplexity_on", "perplexity_off")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reproduce", description="The experiments of docs/evidence.md.")
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="default: %(default)s")
    parser.add_argument("--data", type=Path, help="folder with the data sets; needed to run anything")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default: results/")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TASK/SETTING",
        help="default: all of both tasks, or those that several architectures or the guard are compared by",
    )
    parser.add_argument("--seeds", "--seed", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--jobs", type=int, default=1, help="runs beside each other (default: %(default)s)")
    parser.add_argument(
        "--launched",
        action="store_true",
        help="also train as pipelines of four ranks and compare: --only, or a few, with the first seed",
    )
    args = parser.parse_args(arguments)
    known = [f"{task}/{setting}" for task in PRESETS[args.preset] for setting in SETTINGS[task]]
    for name in args.only or ():
        if name not in known:
            parser.error(f"--only: {name!r} is not a setting; known: {', '.join(known)}")
    if args.jobs < 1 or min(args.seeds) < 0:
        parser.error("--jobs: from 1; --seeds: from 0")
    return args


def grid(preset: str, only: list[str] | None, seeds: list[int]) -> list[Run]:
    """All runs asked for: the baselines with all their seeds first, then seed by seed, the most telling
    settings of both tasks first."""
    several = PRESETS[preset].keys() & {*PRESETS["small"]}
    usual = {"replicas": (*NONE, *REPLICAS), "guard": JUDGED}.get(preset, COMPARED)
    named = {
        (task, setting): place
        for task in PRESETS[preset]
        for place, setting in enumerate(SETTINGS[task])
        if (f"{task}/{setting}" in only if only else not several or setting in usual)
    }
    runs = [Run(preset, task, setting, seed) for task, setting in named for seed in seeds]
    return sorted(
        runs, key=lambda run: (run.setting != "none", seeds.index(run.seed), named[run.task, run.setting])
    )


def show(run: Run, row: Row | str) -> str:
    """Format a finished run in one line."""
    name = f"{run.task}/{run.setting} seed {run.seed}"
    if isinstance(row, str):
        return f"{name}: failed: {row}"
    found = ((measure, row[measure]) for measure in MEASURES if measure in row)
    values = ", ".join(f"{measure} {'none' if value is None else f'{value:.3f}'}" for measure, value in found)
    bits = f"{row['bits_forward']:.2f}/{row['bits_backward']:.2f} bits"
    return f"{name}: {values}, {bits}, {row['seconds']:.0f} s"


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    runs = grid(args.preset, args.only, args.seeds)
    file = args.results / f"{args.preset}.jsonl"
    left = missing(runs, read_rows(file))
    print(f"{len(runs)} runs, {len(runs) - len(left)} of them have their rows in {file}", flush=True)
    if (left or args.launched) and args.data is None:
        raise SystemExit("reproduce: --data is needed: the folder with cifar10/ and wikitext2/")
    started, failed = time.monotonic(), 0
    for number, (run, row) in enumerate(execute_runs(left, args.data, args.results, args.jobs), 1):
        failed += isinstance(row, str)
        minutes = (time.monotonic() - started) / number * (len(left) - number) / 60
        print(f"[{number}/{len(left)}] {show(run, row)}; about {minutes:.0f} min left", flush=True)
    if args.launched:
        chosen = [run for run in runs if run.seed == args.seeds[0] and (args.only or run.setting in LAUNCHED)]
        compare(chosen, args.data, args.results)
    if read_rows(file):
        write_page(args.results, args.results / "evidence.md")
    if failed:
        raise SystemExit(f"reproduce: {failed} of {len(left)} runs failed")
