"""Read runs from the CSV files of DeepSpeed's csv_monitor."""

import csv
import itertools
import math
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from ds_compress.config import DIRECTIONS
from ds_compress.errors import CompressionError, failures_at
from ds_compress.monitor.metrics import GRADIENTS, LOSS_COST, PIPELINE, PREFIX, exchange_label, label

LOSS = "Train/Samples/train_loss"
FINAL = 5  # losses whose mean is the final loss

OF_PLACE = rf"Train_Compression_(boundary_\d+|{'|'.join(GRADIENTS)})_(forward|backward|stage_\d+)_(\w+)\.csv"
"""Name of a file with a metric of a channel, or of gradients that a stage exchanges."""

RUNNING_TOTALS = "raw_bytes", "wire_bytes", "rounds"
"""Names of the values that begin at 0 when a run goes on from a checkpoint."""

OTHER_MONITORS = {"TensorBoard": "events.out.tfevents.*", "W&B": "run-*.wandb"}
"""Patterns of the files of monitors that compare runs themselves."""

Series = list[tuple[int, float]]


@dataclass
class RecordedRun:
    """One run: its series of (samples, value) by label, in the order of the samples."""

    name: str
    series: dict[str, Series]

    @property
    def boundaries(self) -> int:
        """Return how many boundaries wrote values."""
        return next(n for n in itertools.count() if label("wire_bytes", n, "forward") not in self.series)

    def total(self, name: str, kind: str = "") -> Series:
        """Sum a value over all channels, at the samples where all have one; with a kind in `GRADIENTS`: a
        value of gradients that are exchanged, over all stages."""
        values = [dict(own) for own in self._everywhere(name, kind)]
        shared = set.intersection(*map(set, values)) if values else set()
        return [(samples, sum(each[samples] for each in values)) for samples in sorted(shared)]

    def last_total(self, name: str, kind: str = "") -> float:
        """Return the last value of `total`, which is that of the whole run; nan where it wrote none."""
        series = self.total(name, kind)
        return series[-1][1] if series else math.nan

    def _everywhere(self, name: str, kind: str) -> list[Series]:
        """Return the series of a value of all channels, or with a `kind` of all stages."""
        places = rf"{kind}/stage_\d+" if kind else rf"boundary_\d+/({'|'.join(DIRECTIONS)})"
        return [own for each, own in self.series.items() if re.fullmatch(f"{PREFIX}/{places}/{name}", each)]

    def bytes_ratio(self, kind: str = "") -> float:
        """Return raw over wire bytes of the whole run, of what `total` sums; nan where it wrote none."""
        return _ratio(self.last_total("raw_bytes", kind), self.last_total("wire_bytes", kind))

    def rounds(self) -> dict[str, float]:
        """Return what rounds of replicas that are launched apart were like; empty if none is known.

        Returns:
            rounds: their number; members_least, members_most: replicas that counted; mb: sent by this one
            in a round, by all stages; seconds: median, of the slowest stage; both nan where none wrote it.
        """
        counts = self.series.get(exchange_label("replicas", 0, "rounds"), [])
        if not counts or not counts[-1][1]:
            return {}
        present = self.series.get(exchange_label("replicas", 0, "members"), [])
        samples = {at for at, count in present if count}  # a run that goes on begins without a round
        if not samples:
            return {}
        members = [count for at, count in present if at in samples]
        times = [[s for at, s in own if at in samples] for own in self._everywhere("round_s", "replicas")]
        return {
            "rounds": counts[-1][1],
            "members_least": min(members),
            "members_most": max(members),
            "mb": self.last_total("wire_bytes", "replicas") / counts[-1][1] / 1e6,
            "seconds": max((statistics.median(own) for own in times if own), default=math.nan),
        }

    def median(self, name: str, boundary: int | None = None, direction: str | None = None) -> float:
        """Return median of the finite values of a label, nan when there is none."""
        series = self.series.get(label(name, boundary, direction), ())
        return statistics.median([value for _, value in series if math.isfinite(value)] or [math.nan])

    def per_step(self, name: str, boundary: int, direction: str) -> float:
        """Return the mean growth of a running total in a step; nan where it was written less than twice, or
        no loss was written between."""
        points = self.series.get(label(name, boundary, direction), [])
        if len(points) < 2:
            return math.nan
        (start, least), (end, most) = points[0], points[-1]
        return _ratio(most - least, sum(start < samples <= end for samples, _ in self.series[LOSS]))

    @property
    def final_loss(self) -> float:
        """Return mean of the last losses."""
        last = [loss for _, loss in self.series[LOSS][-FINAL:]]
        return sum(last) / len(last)  # fmean refuses inf beside -inf


def _ratio(value: float, by: float) -> float:
    """Return value / by; nan where `by` is not above 0."""
    return value / by if by > 0 else math.nan


def find_baseline(runs: list[RecordedRun]) -> RecordedRun | None:
    """Return the first run that sent uncompressed messages: DeepSpeed alone, or codec `none`."""

    def is_plain(run: RecordedRun) -> bool:
        ratios = [run.bytes_ratio(kind) for kind in ("", *GRADIENTS)]
        return all(math.isnan(ratio) or abs(ratio - 1) < 0.01 for ratio in ratios)

    return next(filter(is_plain, runs), None)


def headline(run: RecordedRun, base: RecordedRun | None) -> str:
    """Format a run in one line: `"topk10: 15.2x fewer bytes, +0.098 loss, 1.9x steps/s against none"`."""
    facts = []
    times = run.bytes_ratio()
    if not math.isnan(times):
        facts.append(f"{times:.3g}x fewer bytes" if times >= 1.01 else "messages uncompressed")
    for kind, of_what in GRADIENTS.items():
        fewer = run.bytes_ratio(kind)
        if not math.isnan(fewer):
            facts.append(f"{fewer:.3g}x fewer bytes {of_what}")
    rounds = run.rounds()
    if rounds:
        least, most = rounds["members_least"], rounds["members_most"]
        members = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        facts.append(
            f"{rounds['rounds']:g} rounds of {members} replicas, {rounds['mb']:.3g} MB and "
            f"{rounds['seconds']:.3g} s each"
        )
    if base is not None and base is not run:
        facts.append(f"{run.final_loss - base.final_loss:+.3f} loss")
        faster = _ratio(base.median("step_ms"), run.median("step_ms"))
        if not math.isnan(faster):
            facts.append(f"{faster:.2f}x steps/s")
        facts[-1] += f" against {base.name}"
    else:
        facts.append(f"loss {run.final_loss:.3f}")
    costs = run.series.get(label(LOSS_COST), [])
    if costs:
        facts.append(f"the guard last measured {costs[-1][1]:+.3f} loss by compression")
    return f"{run.name}: {', '.join(facts)}"


def read_runs(path: Path) -> list[RecordedRun]:
    """Read the runs at `path`, or wherever they are below it.

    One that cannot be read, or holds no training loss, is skipped with a line on stderr if there are others.

    Raises:
        CompressionError: there is no run that can be read.
    """
    if not path.exists():
        raise CompressionError(f"report: {path} is not there")
    folders = sorted({file.parent for file in path.rglob(_file(LOSS))})
    if not folders:
        found = [monitor for monitor, files in OTHER_MONITORS.items() if any(path.rglob(files))]
        but = f", but files of {' and '.join(found)}" if found else ""
        raise CompressionError(
            f'report: {path} holds no CSV files of a run{but}; switch "csv_monitor" on in ds_config.json, '
            "beside TensorBoard or W&B, which compare runs themselves"
        )
    runs: list[RecordedRun] = []
    unusable: list[CompressionError] = []
    for folder in folders:
        try:
            runs.append(RecordedRun(_name(path, path if len(folders) == 1 else folder), _read(folder)))
        except CompressionError as error:
            unusable.append(error)
    if not runs:
        raise unusable[0]
    for reason in unusable:
        print(f"{reason}; skipped", file=sys.stderr)
    return runs


def _join(name: str, written: Series) -> Series:
    """Sort what a run wrote; of a step that was done twice the last value counts. Running totals go on where
    the run went on from a checkpoint."""
    found, before, last = Series(), 0.0, 0.0
    for at, value in sorted(dict(written).items()):
        if name.rpartition("/")[2] in RUNNING_TOTALS:
            # each step sends messages, but not each ends a round
            began_anew = value < last or (value == last and "/boundary_" in name)
            before += last if began_anew else 0.0
            last = value
        found.append((at, before + value))
    return found


def _name(path: Path, folder: Path) -> str:
    """Name the run in `folder` after the folders below `path`, leaving out "csv", which every run has.

    If none is left, use the last part of `folder`.
    """
    parts, above = ([part for part in each.resolve().parts if part != "csv"] for each in (folder, path))
    return "/".join(parts[len(above) :]) or parts[-1]


def _read(folder: Path) -> dict[str, Series]:
    """Read a file per label. DeepSpeed replaces / by _, so only labels of a known form are found."""
    matches = [re.fullmatch(OF_PLACE, file.name) for file in folder.iterdir()]
    of_places = ["/".join([PREFIX, *match.groups()]) for match in matches if match]
    files = {name: folder / _file(name) for name in (LOSS, *map(label, (*PIPELINE, LOSS_COST)), *of_places)}
    series = {name: _join(name, read_series(file)) for name, file in files.items() if file.exists()}
    if not series[LOSS]:
        raise CompressionError(f"report: {folder} holds no {LOSS}: the run wrote no step")
    return series


def _file(name: str) -> str:
    return f"{name.replace('/', '_')}.csv"


def read_series(file: Path) -> Series:
    """Read a file of steps and values; its last line may not be complete yet.

    A run that continues in the same folder writes another header, and steps again that it had done before.
    """
    with failures_at(f"report: {file}"):
        whole, _, _ = file.read_text(errors="replace").rpartition("\n")
    with failures_at(f"report: {file} is not lines of a step and a value"):
        lines = csv.reader(whole.splitlines())
        return [(int(samples), float(value)) for samples, value in lines if samples != "step"]
