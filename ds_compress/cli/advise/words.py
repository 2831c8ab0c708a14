"""The answer of `ds-compress advise` in words and tables."""

from collections.abc import Sequence
from typing import Any

from ds_compress.config.quality import Limits
from ds_compress.planning.choice import error, within


def in_table(stock: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """A row of `rank` as a line of the table; `stock`: DeepSpeed's own."""
    return {
        "recipe": row["recipe"],
        "link": f"{row['link']}, depth {row['depth']}",
        "error": f"{row['error_forward']:.3f} / {row['error_backward']:.3f}",
        "ratio": f"{sum(stock['wire_bytes']) / sum(row['wire_bytes']):.2f}",
        "step, ms": f"{1e3 * row['step_s']:.1f}",
        "speed-up": f"{row['speedup']:.2f}",
        "limited by": row["limit"],
        "link busy": f"{100 * row['link_busy']:.0f} %",
        "held, MB": f"{row['memory_bytes'] / 1e6:,.0f}",
    }


def measured_here(measured: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """Title and rows of what was measured on a model: stages, and what they send."""
    sent = {(own["boundary"], own["direction"]): own["bytes"] for own in measured["messages"]}
    rows = [
        {
            "stage": f"{own['stage']}",
            "forward, ms": f"{own['forward_ms']:,.1f}",
            "backward, ms": f"{own['backward_ms']:,.1f}",
            "held of a micro-batch, MB": "?" if own["held_mb"] is None else f"{own['held_mb']:,.1f}",
            "sends on, bytes": f"{sent.get((own['stage'], 'forward'), 0):,}",
            "sends back, bytes": f"{sent.get((own['stage'] - 1, 'backward'), 0):,}",
        }
        for own in measured["stages"]
    ]
    return f"measured here, on {measured['device']}, {measured['threads']} thread(s)", rows


def verdict(rows: Sequence[dict[str, Any]], chosen: dict[str, Any] | None, limits: Limits, asked: str) -> str:
    """What to use, how much faster a step gets, and what limits it then: one line.

    Args:
        rows: of `rank`.
        chosen: the best of them, if one pays.
        asked: the option that says the limits.
    """
    stock = rows[0]
    # at the depth at which that is the fastest: stages that differ gain by it without any link
    free = min(row["step_s"] / row["speedup_limit"] for row in rows)
    ceiling = f"a link without any cost would make it {stock['step_s'] / free:.2f} times as fast"
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
