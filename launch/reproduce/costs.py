"""What settings cost on every model: each run against the uncompressed run of the same seed."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launch.reproduce.presets import HELD_OUT, PRESETS
from launch.reproduce.run import Row
from launch.reproduce.settings import REPLICAS
from launch.reproduce.tables import METRICS, markdown

ACROSS = ("real", "small", "wide", "long")
"""Presets of several architectures, on which recipes are judged."""
REAL_TASKS = {
    "smollm2-full": "SmolLM2, all weights",
    "smollm2-lora": "SmolLM2, LoRA",
    "minilm-full": "MiniLM, all weights",
}
REAL = tuple(REAL_TASKS.values())
SMALL = ("fine-tuned", "from scratch", "CNN")
"""Kinds of tasks, as the tables of recipes name them: with the weights of others, and with our own."""
REPLICA_NAMES = {
    "replicas8-ef": "8 bits, `ef`",
    "replicas4-ef": "4 bits, `ef`",
    "replicas4-loco": "4 bits, `loco`",
    "replicas4-dither": "4 bits, dither",
    "replicas3-dither": "3 bits, dither, entropy coder",
    "replicas-rank8-ef": "`lowrank`, rank 8, `ef`",
    "replicas8-4-ef-accordion": "8 or 4 bits by `accordion` of release 0.3, `ef`",
    "replicas4-ef+entropy4-rank8/dither3": "4 bits, `ef`; stages as `safe`",
    "replicas4-dither+entropy4-rank8/dither3": "4 bits, dither; stages as `safe`",
    "replicas4-ef+basis4/dither3": "4 bits, `ef`; stages as `safe` of release 0.3",
    "replicas4-dither+basis4/dither3": "4 bits, dither; stages as `safe` of release 0.3",
}
"""Names of settings in the table of gradients between replicas."""
TIED_TASKS = {
    "smollm2-full": "SmolLM2, fine-tuned, 200 steps",
    "tied-300": "from scratch, 300 steps",
    "tied-1200": "from scratch, 1,200 steps",
}
TIED_NAMES = {
    "tied4-ef": "4 bits, `ef`; messages exact",
    "tied2-ef": "2 bits, `ef`; messages exact",
    "tied1%-ef": "`topk` 1 %, `ef`; messages exact",
    "entropy4-rank8/dither3": "exact; messages as `safe`",
    "tied4-ef+entropy4-rank8/dither3": "4 bits, `ef`; messages as `safe`: recipe `safe`",
    "tied1%-ef+entropy4-rank8/dither3": "`topk` 1 %, `ef`; messages as `safe`",
}
"""Tasks and settings in the table of gradients of a tied embedding."""


class Cost(NamedTuple):
    """What a setting costs in one task, means over seeds.

    Percent of the held-out loss (nats a token), or points of accuracy; larger is worse, inf: it diverged.
    """

    preset: str
    task: str
    seeds: int
    ratio: float  # times fewer bytes than fp32, headers included
    off: float  # evaluated with uncompressed messages
    on: float  # evaluated with compressed messages

    @property
    def kind(self) -> str:
        """Which column of the tables of recipes it belongs to: one of `REAL` or `SMALL`."""
        if self.task in REAL_TASKS:
            return REAL_TASKS[self.task]
        if METRICS[self.task] == "accuracy":
            return "CNN"
        return "fine-tuned" if self.task.endswith("-finetuned") else "from scratch"


def costs_of(rows: Iterable[Row], setting: str, presets: Sequence[str] = ACROSS) -> list[Cost]:
    """Return the costs of a setting in every task that has rows of it, and uncompressed ones of its seeds.

    Bytes are those of messages between stages; of preset `replicas`, those between replicas.
    """
    found = {(row["preset"], row["task"], row["setting"], row["seed"]): row for row in rows}
    costs = []
    for preset in presets:
        sent = "replica_" if preset == "replicas" else ""
        for task in PRESETS[preset]:
            seeds = [key[3] for key in found if key[:3] == (preset, task, setting)]
            pairs = [(found[preset, task, setting, s], found.get((preset, task, "none", s))) for s in seeds]
            known = [(row, base) for row, base in pairs if base is not None]
            if known:
                off, on = (
                    statistics.fmean(lost(*pair, METRICS[task], way) for pair in known)
                    for way in ("off", "on")
                )
                raw, wire = (sum(row[f"{sent}{k}_bytes"] for row, _ in known) for k in ("raw", "wire"))
                costs.append(Cost(preset, task, len(known), raw / wire, off, on))
    return costs


def lost(row: Row, base: Row, metric: str, way: str) -> float:
    """Return what a run costs against the uncompressed run `base`: percent of the loss, or points.

    Args:
        metric: of the task, as in `METRICS`.
        way: how both are evaluated, "off" or "on".
    """
    value, before = row[f"{metric}_{way}"], base[f"{metric}_{way}"]
    if value is None:
        return math.inf
    return before - value if metric == "accuracy" else 100 * (math.log(value) / math.log(before) - 1)


def worst(costs: Sequence[Cost]) -> tuple[float, float]:
    """Return the largest cost of any task, evaluated off and on."""
    return max(cost.off for cost in costs), max(cost.on for cost in costs)


def cost_table(rows: Sequence[Row], settings: Iterable[str], presets: Sequence[str] = ACROSS) -> str:
    """Compare settings over all tasks of `presets`."""
    found = {setting: costs for setting in settings if (costs := costs_of(rows, setting, presets))}
    columns = [
        (preset, task)
        for preset in presets
        for task in PRESETS[preset]
        if any((cost.preset, cost.task) == (preset, task) for costs in found.values() for cost in costs)
    ]
    lines = []
    for setting, costs in found.items():
        cells = {(cost.preset, cost.task): cost for cost in costs}
        ratio = statistics.fmean(cost.ratio for cost in costs)
        lines.append([f"`{setting}`", f"{ratio:.1f}", *(_cell(cells.get(column)) for column in columns)])
    names = [f"{task}{' (wide)' if preset == 'wide' else ''}" for preset, task in columns]
    header = [f"{name}, held out" if name in HELD_OUT else name for name in names]
    return markdown(["setting", "times fewer bytes", *header], lines)


def replicas_table(rows: Sequence[Row]) -> str:
    """Compare settings of gradients between replicas: costs off, means over seeds, least and largest."""
    found = {(row["task"], row["setting"], row["seed"]): row for row in rows}
    tasks = [task for task in PRESETS["replicas"] if any(key[0] == task for key in found)]
    lines = []
    for setting in dict.fromkeys(["none", *REPLICAS, *REPLICA_NAMES]):
        own = [row for row in rows if row["setting"] == setting]
        if not own:
            continue
        raw, wire = (sum(row[f"replica_{kind}_bytes"] for row in own) for kind in ("raw", "wire"))
        cells = []
        for task in tasks:
            pairs = [(row, found.get((task, "none", row["seed"]))) for row in own if row["task"] == task]
            costs = [lost(row, base, "perplexity", "off") for row, base in pairs if base is not None]
            if setting == "none":
                losses = [math.log(row["perplexity_off"]) for row, _ in pairs]
                cells.append(f"± {50 * (max(losses) - min(losses)) / statistics.fmean(losses):.2f}")
            elif costs:
                seeds = "" if len(costs) == 3 else f", {len(costs)} seeds"
                spread = f" ({min(costs):+.2f} to {max(costs):+.2f}{seeds})" if costs[1:] else " (1 seed)"
                cells.append(f"{statistics.fmean(costs):+.2f}{spread}")
            else:
                cells.append("")
        name = REPLICA_NAMES.get(setting, f"`{setting}`")
        lines.append([name, f"{raw / wire:.1f}", *cells])
    return markdown(["setting", "times fewer bytes", *tasks], lines)


def tied_table(rows: Sequence[Row]) -> str:
    """Compare settings of gradients of a tied embedding, in the tasks that have rows of one."""
    found = {
        name: {cost.task: cost for cost in costs_of(rows, setting, ("real", "tied"))}
        for setting, name in TIED_NAMES.items()
    }
    tasks = [task for task in TIED_TASKS if any(task in costs for costs in found.values())]
    lines = [[name, *(_cell(costs.get(task)) for task in tasks)] for name, costs in found.items()]
    return markdown(["gradients of the embedding", *(TIED_TASKS[task] for task in tasks)], lines)


def _cell(cost: Cost | None) -> str:
    """Costs off / on, and the number of seeds where these are not three."""
    if cost is None:
        return ""
    seeds = "" if cost.seeds == 3 else f", {cost.seeds} seed{'s' * (cost.seeds > 1)}"
    return f"{cost.off:+.2f} / {cost.on:+.2f}{seeds}"
