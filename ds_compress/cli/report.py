"""ds-compress report: compare runs by the CSV files of DeepSpeed's monitor, as text and PNG files."""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from ds_compress.cli.console import show
from ds_compress.cli.runs import FINAL, LOSS, RecordedRun, find_baseline, headline, read_runs
from ds_compress.errors import CompressionError
from ds_compress.monitor.metrics import GRADIENTS

HELP = "compare finished runs: print a table and a line for each, and write plots as PNG files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of DeepSpeed's csv_monitor, or a folder that contains such folders",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report"), help="folder to write the plots to (default: report)"
    )


def run(args: argparse.Namespace) -> int:
    runs = [run for path in args.runs for run in read_runs(path)]
    [(name, number)] = Counter(run.name for run in runs).most_common(1)
    if number > 1:
        raise CompressionError(
            f"report: {number} runs are named {name!r}; give a folder above them, or folders with other names"
        )
    files = draw(runs, args.out)
    show(
        f"loss: the mean of the last {FINAL}; MB sent: by one replica; ms uncompressed: estimated",
        table(runs),
    )
    base = find_baseline(runs)
    print("\n".join(["", *(headline(run, base) for run in runs)]))
    if files:
        print(f"wrote {', '.join(map(str, files))}")
    return 0


def draw(runs: list[RecordedRun], folder: Path) -> list[Path]:
    """Write the plots of which runs have data, and return their files; without matplotlib there are none, and
    a line is printed."""
    try:
        from ds_compress.cli.plots import PLOTS
    except ImportError as error:
        print(f"report: no plots: {error}; pip install matplotlib, or ds_compress[report]", file=sys.stderr)
        return []
    folder.mkdir(parents=True, exist_ok=True)
    figures = {folder / f"{name}.png": figure for name, plot in PLOTS.items() if (figure := plot(runs))}
    for file, figure in figures.items():
        figure.savefig(file, dpi=120)
    return list(figures)


def summarize(run: RecordedRun) -> dict[str, float]:
    """Compute the loss (mean of the last values), bytes on the wire, ratio and median step of a run; nan
    where unknown."""
    rounds, gradients = run.rounds(), dict[str, float]()
    for kind, of_what in GRADIENTS.items():
        gradients[f"MB {of_what}"] = run.last_total("wire_bytes", kind) / 1e6
        gradients[f"ratio {of_what}"] = run.bytes_ratio(kind)
    return {
        "steps": len(run.series[LOSS]),
        "loss": run.final_loss,
        "MB sent": run.last_total("wire_bytes") / 1e6,
        "ratio": run.bytes_ratio(),
        **gradients,
        "rounds": rounds.get("rounds", math.nan),
        "s per round": rounds.get("seconds", math.nan),
        "ms/step": run.median("step_ms"),
        "ms uncompressed": run.median("uncompressed_step_ms"),
    }


def table(runs: list[RecordedRun]) -> list[dict[str, str]]:
    """Format a row for each run; columns of which no run has a value are left out."""
    rows = {run.name: summarize(run) for run in runs}
    known = {column for row in rows.values() for column, value in row.items() if not math.isnan(value)}
    known.add("loss")  # where it is nan, it became that
    return [
        {
            "run": name,
            **{column: _number(value) for column, value in row.items() if column in known},
            "loss": f"{row['loss']:.4g}",
        }
        for name, row in rows.items()
    ]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
