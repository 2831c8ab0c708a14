"""Show the rows of net.py as a table and as a bar chart."""

from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from ds_compress.cli.console import terminal_width

matplotlib.use("Agg")
from matplotlib import pyplot


def link_of(row: dict[str, Any]) -> tuple[str, float, float]:
    """Return what distinguishes the links of a run of net.py: bandwidth, latency and loss."""
    return row["link"], row["latency_ms"], row["loss"]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "link",
        "ms",
        "jitter, ms",
        "lost, %",
        "recipe",
        "depth",
        "connections",
        "step, s",
        "step / baseline step, unlimited link",
        "step / baseline step, same link",
        "baseline step, unlimited link / step",
        "MB a step",
        "link busy",
        "predicted, s",
        "off by",
        title=f"{rows[0]['stages']} stages, 8 micro-batches",
    )
    for row in rows:
        table.add_row(
            row["link"],
            f"{row['latency_ms']:g}",
            f"{row['jitter_ms']:g}",
            f"{row['loss']:g}",
            f"{row['recipe']}: {row['chosen']}" if row["chosen"] else row["recipe"],
            str(row["depth"]) if row["depth"] == row["depth_ran"] else f"{row['depth']}: {row['depth_ran']}",
            str(row["connections"]) if row["connections"] != "auto" else f"auto: {row['connections_ran']}",
            f"{row['step_s']:.3f}",
            f"{row['step_over_stock_unshaped']:.3f}",
            f"{row['step_over_stock_same_link']:.3f}",
            f"{row['share_of_free_link']:.3f}",
            f"{row['wire_bytes'] / 1e6:.2f}",
            f"{100 * row['link_busy']:.0f} %" if row["link_busy"] else "",
            f"{row['predicted_step_s']:.3f}",
            f"{100 * (row['predicted_step_s'] / row['step_s'] - 1):+.0f} %",
        )
    Console(width=terminal_width()).print(table)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    links = list(dict.fromkeys(map(link_of, rows)))
    figure, axes = pyplot.subplots(
        1, len(links), figsize=(4 * len(links), 4), squeeze=False, layout="constrained"
    )
    for axis, link in zip(axes[0], links):
        here = [row for row in rows if link_of(row) == link]
        names = [row["recipe"] if row["depth"] == 1 else f"{row['recipe']}, {row['depth']}" for row in here]
        names = [
            name if row["connections"] == 1 else f"{name}, {row['connections']} connections"
            for name, row in zip(names, here, strict=True)
        ]
        axis.bar(names, [row["step_over_stock_unshaped"] for row in here], label="measured")
        predicted = [row["predicted_step_s"] / rows[0]["step_s"] for row in here]
        axis.plot(names, predicted, "k_", markersize=12, label="predicted")
        axis.axhline(1, color="grey", linewidth=0.8)
        name, latency, loss = link
        title = f"{name}, {latency:g} ms" if latency else name
        axis.set_title(f"{title}, {loss:g} % lost" if loss else title)
        axis.tick_params(axis="x", rotation=60)
    axes[0][0].set_ylabel("step / baseline step, unlimited link")
    axes[0][0].legend()
    figure.savefig(file, dpi=150)
