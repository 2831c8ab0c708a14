"""Plot quality against bytes."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from launch.reproduce.tables import METRICS, UNITS, Setting, front

SIGN = {"accuracy": 1, "perplexity": -1}  # of the better direction


def pareto_plot(settings: Sequence[Setting], image: Path) -> None:
    """Each setting at its bits for each value and its mean, with compression on and off; a line through those
    that nothing beats."""
    metric = METRICS[settings[0].task]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for evaluated, marker in (("on", "o"), ("off", "x")):
        shown = [each for each in settings if each.metric(evaluated).seeds]
        axes.scatter(
            [each.bits for each in shown],
            [each.metric(evaluated).mean for each in shown],
            marker=marker,
            label=f"compression {evaluated}",
        )
    best = front(settings, lambda each: _best(each, metric))
    axes.plot(
        [each.bits for each in best], [SIGN[metric] * _best(each, metric) for each in best], linewidth=0.8
    )
    for each in best:
        axes.annotate(each.name, (each.bits, SIGN[metric] * _best(each, metric)), fontsize=7)
    if metric == "perplexity":
        axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bits sent for each value, both directions")
    axes.set_ylabel(UNITS[metric])
    axes.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


def _best(setting: Setting, metric: str) -> float:
    """Return the better of on and off, larger is better; -inf if no run has a number."""
    found = [setting.metric(evaluated) for evaluated in ("on", "off")]
    return max((SIGN[metric] * each.mean for each in found if each.seeds), default=float("-inf"))
