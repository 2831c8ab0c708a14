"""ds-compress report: compare runs by what DeepSpeed's monitors wrote, as text, PNG files and a HTML page."""

import argparse
import base64
import html
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_compress.cli.runs import FINAL, LOSS, RecordedRun, find_baseline, headline, read_runs
from ds_compress.errors import CompressionError
from ds_compress.monitor.metrics import GRADIENTS

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
       color: #1b1b1b; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .3rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr + tr { border-top: 1px solid #ddd; }
figure { margin: 2rem 0; } img { max-width: 100%; } figcaption { color: #555; }
"""


HELP = "compare finished runs: write plots and a table as HTML and PNG files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of DeepSpeed's csv_monitor or of TensorBoard, of an online W&B run (its summary has the "
        "last values alone), or a folder that contains such runs",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report"), help="folder to write to (default: report)"
    )


def run(args: argparse.Namespace) -> int:
    runs = _distinct([run for path in args.runs for run in read_runs(path)])
    args.out.mkdir(parents=True, exist_ok=True)
    figures = []
    for name, (plot, caption) in _plots().items():
        figure = plot(runs)
        if figure is not None:
            file = args.out / f"{name}.png"
            figure.savefig(file, dpi=120)
            figures.append((file, caption))
    page = args.out / "report.html"
    page.write_text(_page(runs, figures), encoding="utf-8")
    print("\n".join(headlines(runs)))
    print(f"wrote {page} and {len(figures)} PNG files beside it")
    return 0


def _plots() -> dict[str, Any]:
    """Return `plots.PLOTS`; without matplotlib there are none, and a line is printed."""
    try:
        from ds_compress.cli.plots import PLOTS
    except ImportError as error:
        print(f"report: no plots: {error}; pip install matplotlib, or ds_compress[report]", file=sys.stderr)
        return {}
    return PLOTS


def summarize(run: RecordedRun) -> dict[str, float]:
    """Compute final loss (mean of the last values), bytes on the wire, ratio and median step of a run; nan
    where unknown."""
    sent, rounds, gradients = run.total("wire_bytes"), run.rounds(), dict[str, float]()
    for kind, of_what in GRADIENTS.items():
        wire = run.total("wire_bytes", kind)
        gradients[f"MB {of_what}"] = wire[-1][1] / 1e6 if wire else math.nan
        gradients[f"ratio {of_what}"] = run.bytes_ratio(kind)
    return {
        "steps": len(run.series[LOSS]) if len(run.series[LOSS]) > 1 else math.nan,  # a summary has the last
        "final loss": run.final_loss,
        "MB sent": sent[-1][1] / 1e6 if sent else math.nan,
        "ratio": run.bytes_ratio(),
        **gradients,
        "rounds": rounds.get("rounds", math.nan),
        "s per round": rounds.get("seconds", math.nan),
        "ms per step": run.median("step_ms"),
        "ms per step if uncompressed (estimate)": run.median("uncompressed_step_ms"),
    }


def headlines(runs: list[RecordedRun]) -> list[str]:
    """Return a line for each run, against the first of them that compressed nothing."""
    base = find_baseline(runs)
    return [headline(run, base) for run in runs]


def _distinct(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Name runs of equal names after their runs of W&B; two that have the same name then are refused."""
    names = [run.name for run in runs]
    runs = [replace(r, name=r.wandb_name) if r.wandb_name and names.count(r.name) > 1 else r for r in runs]
    names = [run.name for run in runs]
    for name in (name for name in names if names.count(name) > 1):
        raise CompressionError(
            f"report: {names.count(name)} runs are named {name!r}; give folders with other names"
        )
    return runs


def _page(runs: list[RecordedRun], figures: list[tuple[Path, str]]) -> str:
    rows = {run.name: summarize(run) for run in runs}
    head = "".join(f"<th>{html.escape(title)}</th>" for title in ["run", *next(iter(rows.values()))])
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        f"{''.join(f'<td>{_number(value)}</td>' for value in row.values())}</tr>\n"
        for name, row in rows.items()
    )
    lines = "".join(f"<li>{html.escape(line)}</li>\n" for line in headlines(runs))
    images = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,'
        f'{base64.b64encode(file.read_bytes()).decode()}"><figcaption>{html.escape(caption)}</figcaption></figure>\n'
        for file, caption in figures
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>ds_compress report</title>\n'
        f"<style>{STYLE}</style>\n<h1>ds_compress report</h1>\n<ul>{lines}</ul>\n"
        f"<table><tr>{head}</tr>\n{body}</table>\n"
        f"<p>The loss is the mean of the last {FINAL} values. Bytes are those of one pipeline replica, "
        "beside those of gradients that it sends to the others, and of tied weights that its stages exchange."
        "</p>\n"
        f"{images}</html>\n"
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "&ndash;"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
