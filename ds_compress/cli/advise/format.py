"""Format the answer of `ds-compress advise`: one line and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_compress.config.recipes import LIMITS, Quality
from ds_compress.planning.choice import is_within

if TYPE_CHECKING:
    from ds_compress.hf.footprint import StageFootprint


def format_row(baseline: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """Format a row of `rank` for the table, against the row of the baseline."""
    return {
        "recipe": row["recipe"],
        "link": f"{row['link']}, depth {row['depth']}",
        "error": f"{row['token_error']:.3f} / {row['gradient_error']:.3f}",
        "ratio": f"{sum(baseline['wire_bytes']) / sum(row['wire_bytes']):.2f}",
        "step, ms": f"{1e3 * row['step_s']:.1f}",
        "speed-up": f"{row['speedup']:.2f}",
        "limited by": row["limit"],
        "link busy": f"{100 * row['link_busy']:.0f} %",
        "in flight, MB": f"{row['memory_bytes'] / 1e6:,.0f}",
    }


def format_footprint(footprint: "Sequence[StageFootprint]") -> tuple[str, list[dict[str, str]]]:
    """Format what the stages of a fine-tuning run need: a title, and a row for each."""
    rows = [
        {
            "stage": f"{stage}",
            "layers": f"{own.layers}",
            "parameters, GB": f"{own.parameters / 1e9:.2f}",
            "gradients, optimizer, GB": f"{own.trained / 1e9:.2f}",
            "activations, GB": f"{own.in_flight} x {own.activations / 1e9:.2f}",
            "within a pass, GB": f"{own.working / 1e9:.2f}",
            "together, GB": f"{own.total / 1e9:.2f}",
            "forward, TFLOP": f"{own.forward_flops / 1e12:.2f}",
            "backward, TFLOP": f"{own.backward_flops / 1e12:.2f}",
        }
        for stage, own in enumerate(footprint)
    ]
    return "predicted for a micro-batch, at depth 1", rows


def format_verdict(rows: Sequence[dict[str, Any]], best: dict[str, Any] | None, quality: Quality) -> str:
    """Say in one line what to use, how much faster a step gets, and what limits it then.

    Args:
        rows: of `rank`.
        best: the one to use, if any.
        quality: whose limits hold.
    """
    baseline = rows[0]
    # At the depth at which that is fastest: unequal stages gain by depth without any link
    free = min(row["step_s"] / row["speedup_limit"] for row in rows)
    ceiling = f"a link without any cost would make it {baseline['step_s'] / free:.2f} times as fast"
    if best is None:
        limits = LIMITS[quality]
        allowed = [row for row in rows[1:] if is_within(row, limits)]
        if not allowed:
            most = f"{limits.forward:g} of tokens and {limits.backward:g} of accumulated gradients"
            return f"No recipe has errors up to {most} (--quality {quality}); {ceiling}."
        top = min(allowed, key=lambda row: row["step_s"])
        speed = f"{top['recipe']}, the best, makes a step {top['speedup']:.2f} times as fast"
        return f"Nothing will pay: {speed}; {ceiling}."
    what = f"{best['recipe']} with link depth {best['depth']}"
    compresses = sum(best["wire_bytes"]) < sum(baseline["wire_bytes"])
    lead = f"Use {what}" if compresses else f"Compression will not pay, {what} will"
    limit = {
        "compute": "computing limits it then",
        "codec": "the codec limits it then",
        "link": f"the link limits it then, busy {best['link_busy']:.0%}",
    }[best["limit"]]
    memory = f"; {best['memory_bytes'] / 1e6:,.0f} MB in flight on a stage" if best["depth"] > 1 else ""
    return (
        f"{lead}: a step {best['speedup']:.2f} times as fast, {_time(best['step_s'])} instead of "
        f"{_time(baseline['step_s'])}; {limit}{memory}; {ceiling}."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
