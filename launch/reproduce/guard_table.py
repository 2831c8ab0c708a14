"""Make the table of the guard: which settings it warns of, and whether these hurt.

A setting hurts in a task if training under it costs more than `HARM` (`costs.py`), evaluated uncompressed.
The guard warns if messages exceed its limits at its steps, if the last weights of a language model, evaluated
compressed and not, differ by more than `guard.loss`, or if all of this is too much together. Losses of images
are not in the rows.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from ds_compress.config import Config
from ds_compress.monitor.guard_limits import LOSSLESS
from launch.reproduce.costs import lost
from launch.reproduce.presets import HELD_OUT
from launch.reproduce.run import Row
from launch.reproduce.tables import METRICS, markdown

FILES = ("guard", "small", "wide")
"""Presets whose rows are judged: those of settings that may hurt, and those that recipes are judged by."""
HARM = 3.0
"""Percent of the loss, or points of accuracy: what the recipe "aggressive" promises."""


def warns(row: Row) -> bool:
    """Return whether the guard warns of a run, by its present limits of gradients and of the loss."""
    guard = Config({}).block.guard
    others = set(row["warnings"]) - {"gradient_error"}
    if row["diverged"] or others or row["gradient_error"] > guard.gradient_error:
        return True
    errors = {"error": row["error_forward"] or 0.0, "gradient_error": row["gradient_error"]}
    shares = LOSSLESS._replace(**errors).shares(guard)
    if METRICS[row["task"]] == "perplexity":
        on, off = math.log(row["perplexity_on"]), math.log(row["perplexity_off"])
        shares["loss"] = abs(on - off) / off / guard.loss
    return math.hypot(*shares.values()) > 1


def guard_table(rows: Iterable[Row]) -> str:
    """Return the table in Markdown, cheapest settings first, and how many verdicts are wrong, also of the
    settings of preset `guard` on a model that took no part in the choice of a limit.

    Rows of several seeds are one line: mean cost, and a warning if the guard warned in most of them.
    """
    found = {(row["preset"], row["task"], row["setting"], row["seed"]): row for row in rows}
    groups: dict[tuple[str, str, str], list[tuple[Row, float]]] = {}
    for (preset, task, setting, seed), row in found.items():
        base = found.get((preset, task, "none", seed))
        # rows of older releases have no warnings, nor have those of pipelines
        if setting != "none" and base is not None and row.get("warnings") is not None:
            cost = math.inf if row["diverged"] else lost(row, base, METRICS[task], "off")
            groups.setdefault((preset, task, setting), []).append((row, cost))
    judged = sorted((statistics.fmean(cost for _, cost in own), key, own) for key, own in groups.items())
    lines = [_line(cost, key, [row for row, _ in own]) for cost, key, own in judged]
    kept_aside = [
        line for line, (_, key, _) in zip(lines, judged) if key[0] == "guard" and key[1] in HELD_OUT
    ]
    header = ["task", "setting", "seeds", "bits", "error", "gradient error", "cost", "the guard", ""]
    table = markdown(header, lines, texts=2)
    held_out = f" Held out ({', '.join(HELD_OUT)}): {_wrong(kept_aside)}." if kept_aside else ""
    return f"{table}\n\n{_wrong(lines)} verdicts are wrong.{held_out}"


def _wrong(lines: Sequence[Sequence[str]]) -> str:
    return f"{sum(line[-1] != 'right' for line in lines)} of {len(lines)}"


def _line(cost: float, key: tuple[str, str, str], rows: Sequence[Row]) -> list[str]:
    preset, task, setting = key
    is_warned = 2 * sum(map(warns, rows)) > len(rows)

    def mean(column: str) -> float:
        return statistics.fmean(math.nan if row[column] is None else row[column] for row in rows)

    return [
        f"{task}{'' if preset == 'guard' else f' ({preset})'}",
        f"`{setting}`",
        str(len(rows)),
        f"{mean('bits_forward'):.1f} / {mean('bits_backward'):.1f}",
        f"{mean('error_forward'):.3f} / {mean('error_backward'):.3f}",
        f"{mean('gradient_error'):.3f}",
        f"{cost:+.1f}",
        "warned" if is_warned else "silent",
        "right" if is_warned == (cost > HARM) else "**wrong**",
    ]
