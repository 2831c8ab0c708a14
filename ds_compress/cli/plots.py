"""Plot runs for `ds-compress report`: each function returns a figure, or None if the runs lack the data."""

import itertools
import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from ds_compress.cli.runs import LOSS, RecordedRun
from ds_compress.config import DIRECTIONS
from ds_compress.monitor.metrics import stage_ms

SIZE = (9, 5)  # inches
COLUMNS, LINE = 100, 0.1  # characters of a name that fit below a picture side by side; inches of one
BAR, ROW = 0.33, 0.23  # inches that an upright name of two lines takes, and a row of a legend
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # a legend, right of its axes
WIDEST = 500  # inches of a picture, of 120 dots each: matplotlib draws less than 2^16 dots
STYLES = "-", "--", ":", "-."  # of each ten runs, as their colors repeat
COLORS = {
    "compute and idle": "#b8c4ce",
    "encode": "#d95f02",
    "decode": "#e6ab02",
    "wait": "#7570b3",
    "send": "#66a5c8",
}


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def loss_against_steps(runs: list[RecordedRun]) -> Figure | None:
    figure, axes = _axes("Training loss", "samples", "loss")
    for number, run in enumerate(runs):
        axes.plot(*zip(*run.series[LOSS]), linestyle=STYLES[number // 10 % len(STYLES)])
    figure.set_figheight(max(SIZE[1], ROW * (len(runs) + 4)))
    # as `label=` of a line, a name that begins with _ is left out
    legend = axes.legend(axes.lines, [run.name for run in runs], **(BESIDE if len(runs) > 10 else {}))
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def bytes_per_step(runs: list[RecordedRun]) -> Figure | None:
    """Draw a bar for each channel of each run, between the first and the last written step; markers: the same
    messages uncompressed."""
    bars = [
        (f"{run.name}\n{boundary} {direction}", number, sent, run.per_step("raw_bytes", boundary, direction))
        for number, run in enumerate(runs)
        for boundary in range(run.boundaries)
        for direction in DIRECTIONS
        if not math.isnan(sent := run.per_step("wire_bytes", boundary, direction))
    ]
    if not bars:
        return None
    figure, axes = _axes("Bytes of a step, by boundary and direction", "", "MB on the wire")
    for x, (_, number, sent, raw) in enumerate(bars):
        axes.bar(x, sent / 1e6, color=f"C{number}", width=0.7)
        _mark(axes, x, raw / 1e6, "uncompressed")
    _name_bars(axes, [name for name, *_ in bars])
    axes.legend()
    return figure


def _mark(axes: Any, x: int, value: float, label: str) -> None:
    """Draw a dotted line across bar `x`; the first one has the `label`."""
    label = "" if x else label
    axes.hlines(value, x - 0.42, x + 0.42, color="black", linestyle=":", label=label)


def _name_bars(axes: Any, names: list[str]) -> None:
    axes.grid(False, axis="x")
    widest = max(len(line) for name in names for line in name.splitlines())
    is_crowded = widest * len(names) > COLUMNS
    if is_crowded:
        axes.figure.set_size_inches(min(max(SIZE[0], 3 + BAR * len(names)), WIDEST), SIZE[1] + LINE * widest)
    turn = 90 if is_crowded else 0
    axes.set_xticks(range(len(names)), names, fontsize="small", rotation=turn, parse_math=False)


def step_time(runs: list[RecordedRun]) -> Figure | None:
    """Draw a bar for each stage of each run, of medians over the written steps; markers: without compression,
    estimated."""
    bars = []
    for run in runs:
        if not math.isnan(run.median("step_ms")) and run.boundaries:
            names = ("encode_ms", "decode_ms", "wait_ms", "send_ms")
            keys = itertools.product(range(run.boundaries), DIRECTIONS)
            channels = {key: {name: run.median(name, *key) for name in names} for key in keys}
            for stage in range(run.boundaries + 1):
                bars.append((f"{run.name}\nstage {stage}", run, stage_ms(channels, stage)))
    if not bars:
        return None
    figure, axes = _axes("Where the time of a step goes", "", "ms per step, median")
    for x, (_, run, spent) in enumerate(bars):
        step = run.median("step_ms")
        base = 0.0
        for part, ms in {"compute and idle": max(0.0, step - sum(spent.values())), **spent}.items():
            axes.bar(x, ms, bottom=base, color=COLORS[part], width=0.7, label=part if x == 0 else None)
            base += ms
        _mark(axes, x, run.median("uncompressed_step_ms"), "uncompressed (estimate)")
    _name_bars(axes, [name for name, *_ in bars])
    axes.legend(**BESIDE)
    return figure


PLOTS: dict[str, Callable[[list[RecordedRun]], Figure | None]] = {
    "loss": loss_against_steps,
    "bytes": bytes_per_step,
    "step_time": step_time,
}
"""Plots by the name of their file."""
