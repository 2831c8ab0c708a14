"""What a run says in one line: fewer bytes, the price in loss, the gain in speed."""

import math

from ds_compress.cli.runs import LOSS, RecordedRun, Series
from ds_compress.monitor.metrics import LOSS_COST, label

SMOOTHED = 10
"""Losses whose mean stands for one: differences are smaller than their noise."""


def bytes_ratio(run: RecordedRun) -> float:
    """Raw over wire bytes of the whole run; nan where it wrote none."""
    raw, wire = (
        series[-1][1] if series else math.nan for series in map(run.total, ("raw_bytes", "wire_bytes"))
    )
    return raw / wire if wire > 0 else math.nan


def baseline(runs: list[RecordedRun]) -> RecordedRun | None:
    """The first run that sent its messages as they are: DeepSpeed alone, or codec `none`."""
    if len(runs) < 2:
        return None
    plain = (run for run in runs if math.isnan(bytes_ratio(run)) or abs(bytes_ratio(run) - 1) < 0.01)
    return next(plain, None)


def headline(run: RecordedRun, base: RecordedRun | None) -> str:
    """`"topk10: 15.2x fewer bytes, +0.098 loss, 1.9x steps/s against none"`."""
    facts = []
    times = bytes_ratio(run)
    if not math.isnan(times):
        facts.append(f"{times:.3g}x fewer bytes" if times >= 1.01 else "messages as they are")
    if base is not None and base is not run:
        facts.append(f"{run.final_loss - base.final_loss:+.3f} loss")
        faster = base.median("step_ms") / run.median("step_ms")
        if not math.isnan(faster):
            facts.append(f"{faster:.2f}x steps/s")
        facts[-1] += f" against {base.name}"
    else:
        facts.append(f"loss {run.final_loss:.3f}")
    costs = run.series.get(label(LOSS_COST), [])
    if costs:
        facts.append(f"the guard last measured {costs[-1][1]:+.3f} loss by compression")
    return f"{run.name}: {', '.join(facts)}"


def difference(run: RecordedRun, base: RecordedRun) -> Series:
    """Smoothed loss of `run` minus that of `base`, at the samples that both have."""
    own, other = dict(_smoothed(run.series[LOSS])), dict(_smoothed(base.series[LOSS]))
    return [(samples, own[samples] - other[samples]) for samples in sorted(own.keys() & other.keys())]


def _smoothed(series: Series) -> Series:
    """The mean of so many values in a row, at the last of them."""
    values = [value for _, value in series]
    window = min(SMOOTHED, len(values))
    return [
        (series[end - 1][0], sum(values[end - window : end]) / window)
        for end in range(window, len(values) + 1)
    ]
