"""Plot runs for `ds-compress report`: each function returns a figure, or None if the runs lack the data."""

import bisect
import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from ds_compress.cli.runs import LOSS, SMOOTHED, RecordedRun, difference, find_baseline, headline
from ds_compress.config import DIRECTIONS
from ds_compress.monitor.metrics import stage_ms

SIZE = (9, 5)  # inches
LINES = ("-", "--", ":", "-.")  # boundaries; runs differ in color
COLORS = {
    "compute and idle": "#b8c4ce",
    "encode": "#d95f02",
    "decode": "#e6ab02",
    "wait": "#7570b3",
    "send": "#66a5c8",
}


def _axes(title: str, x: str, y: str, more_lines: int = 0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(SIZE[0], SIZE[1] + 0.3 * more_lines), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left" if more_lines else "center", size="medium" if more_lines else "large")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _logarithmic_x(axes: Any) -> None:
    """Label a logarithmic axis with plain numbers, 20 and 400, instead of powers of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.tick_params(axis="x", which="both", length=3.5, pad=3.5)  # labels of both kinds at one height


def first_page(runs: list[RecordedRun]) -> Figure | None:
    """Write a line for each run over its loss minus that of the run that compressed nothing."""
    base = find_baseline(runs)
    if base is None:
        return None
    lines = [headline(run, base) for run in runs]
    figure, axes = _axes("\n".join(lines), "samples", f"loss minus that of {base.name}", len(lines))
    axes.axhline(0, color="black", linewidth=0.8)
    for number, run in enumerate(runs):
        points = difference(run, base)
        if run is not base and points:
            axes.plot(*zip(*points), label=run.name, color=f"C{number}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return figure


def loss_against_steps(runs: list[RecordedRun]) -> Figure | None:
    figure, axes = _axes("Training loss", "samples", "loss")
    for number, run in enumerate(runs):
        axes.plot(*zip(*run.series[LOSS]), label=run.name, color=f"C{number}")
    axes.legend()
    return figure


def loss_against_bytes(runs: list[RecordedRun]) -> Figure | None:
    """Draw the loss over bytes.

    Bytes are known at fewer samples than the loss: every loss since the last count is averaged.
    """
    figure, axes = _axes("Training loss against bytes sent", "MB on the wire, all boundaries", "loss")
    for number, run in enumerate(runs):
        points, losses, since = [], run.series[LOSS], 0
        for samples, sent in run.total("wire_bytes"):
            until = bisect.bisect_right(losses, (samples, math.inf))
            if window := [loss for _, loss in losses[since:until]]:
                points.append((sent / 1e6, sum(window) / len(window)))
            since = until
        if points:
            axes.plot(*zip(*points), label=run.name, color=f"C{number}", marker=".")
    if not axes.lines:
        return None
    _logarithmic_x(axes)
    axes.legend()
    return figure


def error_per_boundary(runs: list[RecordedRun]) -> Figure | None:
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(1, len(DIRECTIONS), sharey=True)
    for axes, direction in zip(panels, DIRECTIONS):
        axes.set(title=direction, xlabel="samples")
        axes.grid(alpha=0.3)
        for number, run in enumerate(runs):
            for boundary in range(run.boundaries):
                points = [p for p in run.channel("relative_error", boundary, direction) if p[1] > 0]
                if points:
                    style = LINES[boundary % len(LINES)]
                    axes.plot(
                        *zip(*points), style, color=f"C{number}", label=f"{run.name}, boundary {boundary}"
                    )
    if not any(axes.lines for axes in panels):
        return None
    panels[0].set(ylabel="||x - C(x)|| / ||x||", yscale="log")
    for axes in panels:
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle("Relative error of the messages")
    return figure


def step_time(runs: list[RecordedRun]) -> Figure | None:
    """Draw a bar for each stage of each run, of medians over the written steps; markers: without compression,
    estimated."""
    bars = []
    for run in runs:
        if not math.isnan(run.median("step_ms")) and run.boundaries:
            names = ("encode_ms", "decode_ms", "wait_ms", "send_ms")
            channels = [
                {d: {name: run.median(name, b, d) for name in names} for d in DIRECTIONS}
                for b in range(run.boundaries)
            ]
            for stage in range(run.boundaries + 1):
                bars.append((f"{run.name}\nstage {stage}", run, stage_ms(channels, stage)))
    if not bars:
        return None
    figure, axes = _axes("Where the time of a step goes", "", "ms per step, median")
    axes.grid(False, axis="x")
    for x, (_, run, spent) in enumerate(bars):
        step = run.median("step_ms")
        base = 0.0
        for part, ms in {"compute and idle": max(0.0, step - sum(spent.values())), **spent}.items():
            axes.bar(x, ms, bottom=base, color=COLORS[part], width=0.7, label=part if x == 0 else None)
            base += ms
        axes.hlines(
            run.median("uncompressed_step_ms"),
            x - 0.42,
            x + 0.42,
            color="black",
            linestyle=":",
            label="uncompressed (estimate)" if x == 0 else None,
        )
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars], fontsize="small")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def pareto(runs: list[RecordedRun]) -> Figure | None:
    """Draw loss over bytes; a line joins runs that no other beats in both."""
    series = (run.total("wire_bytes") for run in runs)
    points = [(own[-1][1] / 1e6, runs[n].final_loss, n) for n, own in enumerate(series) if own]
    if not points:
        return None
    figure, axes = _axes("Bytes or loss: what each run pays", "MB on the wire, all boundaries", "final loss")
    front, best = [], math.inf
    for sent, loss, _ in sorted(points):
        if loss < best:
            best = loss
            front.append((sent, loss))
    axes.plot(*zip(*front), color="#999999", linestyle="--", zorder=1)
    for sent, loss, number in points:
        axes.scatter(sent, loss, color=f"C{number}", zorder=2, s=50)
        axes.annotate(runs[number].name, (sent, loss), xytext=(7, 5), textcoords="offset points")
    _logarithmic_x(axes)
    axes.margins(0.15)
    return figure


PLOTS: dict[str, tuple[Callable[[list[RecordedRun]], Figure | None], str]] = {
    "first_page": (
        first_page,
        f"Loss minus that of the run that compressed nothing, means of {SMOOTHED} steps.",
    ),
    "loss_steps": (loss_against_steps, "Training loss against samples seen."),
    "loss_bytes": (loss_against_bytes, "The same loss against the bytes that crossed all stage boundaries."),
    "error": (
        error_per_boundary,
        "Relative error of one message of each written step; channels without error are absent.",
    ),
    "step_time": (
        step_time,
        "Stages side by side. Idle time before a message comes is part of wait; the dotted line is "
        "an estimate of the step without compression, and without the codecs' time.",
    ),
    "pareto": (
        pareto,
        "Final loss against bytes; the dashed line joins runs that no other run beats in both.",
    ),
}
"""File name, plot and caption."""
