"""The answer of `ds-compress advise` in words."""

from collections.abc import Sequence
from typing import Any

from ds_compress.config.quality import Limits
from ds_compress.planning.choice import error, within


def verdict(rows: Sequence[dict[str, Any]], chosen: dict[str, Any] | None, limits: Limits, asked: str) -> str:
    """What to use, how much faster a step gets, and what limits it then: one line.

    Args:
        rows: of `rank`.
        chosen: the best of them, if one pays.
        asked: the option that says the limits.
    """
    stock = rows[0]
    ceiling = f"a link without any cost would make it {stock['speedup_limit']:.2f} times as fast"
    if chosen is None:
        allowed = [row for row in rows[1:] if within(row, limits)]
        if not allowed:
            most = f"{limits.forward:g} forward and {limits.backward:g} backward ({asked})"
            return f"No recipe has errors up to {most}; {ceiling}."
        top = min(allowed, key=lambda row: row["step_s"])
        speed = f"{top['recipe']}, the best, makes a step {top['speedup']:.2f} times as fast"
        return f"Nothing will pay: {speed}; {ceiling}."
    what = f"{chosen['recipe']} with link depth {chosen['depth']}"
    lead = f"Compression will not pay, {what} will" if error(chosen) == 0 else f"Use {what}"
    limit = {
        "compute": "computing limits it then",
        "codec": "the codec limits it then",
        "link": f"the link limits it then, busy {chosen['link_busy']:.0%}",
    }[chosen["limit"]]
    memory = f"; {chosen['memory_bytes'] / 1e6:,.0f} MB under way on a stage" if chosen["depth"] > 1 else ""
    return (
        f"{lead}: a step {chosen['speedup']:.2f} times as fast, {_time(chosen['step_s'])} instead of "
        f"{_time(stock['step_s'])}; {limit}{memory}; {ceiling}."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
