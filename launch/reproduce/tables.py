"""Aggregate rows over seeds and format them as Markdown tables."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from launch.reproduce.presets import PRESETS
from launch.reproduce.run import BITS, Row
from launch.reproduce.settings import SETTINGS

KINDS = {task: size.kind for preset in PRESETS.values() for task, size in preset.items()}
METRICS = {task: "accuracy" if kind == "vision" else "perplexity" for task, kind in KINDS.items()}
EXTRA = {"generated_perplexity": "generated text"}
"""Further measures that have columns where they were taken, and what these are called."""
LARGEST = 1000
"""Largest perplexity that tables print: beyond it, a model predicts nothing."""
UNITS = {"accuracy": "accuracy, %", "perplexity": "perplexity a token"}


class Measured(NamedTuple):
    """A number over seeds: mean, half of max - min, runs counted, runs that failed."""

    mean: float
    spread: float  # half of what lies between the smallest and the largest
    seeds: int
    failed: int  # runs that have no finite number

    def __str__(self) -> str:
        if not self.seeds:
            return "diverged"
        spread = f" ± {self.spread:.2f}" if self.seeds > 1 else ""
        number = f"{self.mean:.2f}{spread}" if self.mean <= LARGEST else f"> {LARGEST}"
        return number + (f" ({self.failed} diverged)" if self.failed else "")


class Setting(NamedTuple):
    """All rows of a setting."""

    task: str
    name: str
    rows: list[Row]

    def over_seeds(self, column: str) -> Measured:
        values = [row[column] for row in self.rows if row.get(column) is not None]
        failed = len(self.rows) - len(values)
        if not values:
            return Measured(float("nan"), 0.0, 0, failed)
        return Measured(statistics.fmean(values), (max(values) - min(values)) / 2, len(values), failed)

    def metric(self, evaluated: str) -> Measured:
        """`evaluated`: "on" or "off"."""
        return self.over_seeds(f"{METRICS[self.task]}_{evaluated}")

    @property
    def bits(self) -> float:
        """Mean bits per value, both directions."""
        return BITS * sum(row["wire_bytes"] for row in self.rows) / sum(row["raw_bytes"] for row in self.rows)

    @property
    def ratio(self) -> float:
        """Times fewer bytes than fp32."""
        return BITS / self.bits


def grouped(rows: Iterable[Row], preset: str) -> dict[tuple[str, str], Setting]:
    """Group the rows of a preset by task and setting, in the order of `SETTINGS`; then those of settings that
    a release before had."""
    found: dict[tuple[str, str], Setting] = {}
    own = [row for row in rows if row["preset"] == preset]
    for task, settings in SETTINGS.items():
        for name in dict.fromkeys([*settings, *(row["setting"] for row in own if row["task"] == task)]):
            mine = [row for row in own if (row["task"], row["setting"]) == (task, name)]
            if mine:
                found[task, name] = Setting(task, name, sorted(mine, key=lambda row: row["seed"]))
    return found


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """Format a table in Markdown whose first `texts` columns are text and whose others are numbers."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table(settings: Iterable[Setting]) -> str:
    """Format all settings of one task."""
    settings = list(settings)
    unit = UNITS[METRICS[settings[0].task]]
    header = ["setting", "seeds", "bits forward", "bits backward", "times fewer bytes"]
    header += [f"{unit}, on", "off", "error forward", "error backward"]
    extra = [measure for measure in EXTRA if any(f"{measure}_on" in row for row in settings[0].rows)]
    header += [f"{EXTRA[measure]}, {way}" for measure in extra for way in ("on", "off")]
    return markdown(header, (_line(setting, extra) for setting in settings))


def _line(setting: Setting, extra: Sequence[str]) -> list[object]:
    errors = [setting.over_seeds(f"error_{direction}") for direction in ("forward", "backward")]
    return [
        f"`{setting.name}`",
        len(setting.rows),
        *(f"{setting.over_seeds(f'bits_{direction}').mean:.2f}" for direction in ("forward", "backward")),
        f"{setting.ratio:.1f}",
        setting.metric("on"),
        setting.metric("off"),
        *(f"{error.mean:.3f}" if error.seeds else "" for error in errors),
        *(setting.over_seeds(f"{measure}_{way}") for measure in extra for way in ("on", "off")),
    ]


def matrix(settings: dict[tuple[str, str], Setting], task: str, evaluated: str) -> str:
    """Format bits forward by bits backward of the paper's quantizer; empty if it has no rows."""
    bits = (2, 4, 6, 8)

    def cell(forward: int, backward: int) -> str:
        found = settings.get((task, f"minmax{forward}/{backward}"))
        return str(found.metric(evaluated)) if found else ""

    rows = [[f"{forward} forward", *(cell(forward, backward) for backward in bits)] for forward in bits]
    if not any(text for row in rows for text in row[1:]):
        return ""
    return markdown(["", *(f"{backward} backward" for backward in bits)], rows)


Chooser = Callable[[Setting], float]


def front(settings: Iterable[Setting], quality: Chooser) -> list[Setting]:
    """Return the Pareto front: settings that no other beats in bytes and quality, fewest bytes first."""
    best, found = float("-inf"), []
    for setting in sorted(settings, key=lambda each: (each.bits, -quality(each))):
        if quality(setting) > best:
            best = quality(setting)
            found.append(setting)
    return found
