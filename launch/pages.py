"""Write what README.md and docs/ repeat from results, options and commands: `make docs`.

    python launch/pages.py [--check]

README.md and docs/evidence.md: the tables of recipes, from results/*.jsonl.
docs/evidence-tables.md: all rows in results/*.jsonl, and their plots.
docs/cost-tables.md: what settings cost on every model, and what the guard warns of, from results/*.jsonl.
docs/replicas.md: what settings between replicas cost, from results/replicas.jsonl, and their step times, from
results/replica_links.json.
docs/speed.md, docs/speed-tables.md and docs/images/bandwidth.png: step times, from results/links.json.
docs/speed.md: the speed of codecs, from the rows in docs/speed-tables.md.
docs/options.md, commands.md, metrics.md: from the options, parsers and labels of the package.
`--check` writes nothing and exits with 1 if a page differs from what would be written.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ds_compress.cli import parser
from ds_compress.config.recipes import EVIDENCE
from ds_compress.monitor import metrics
from launch import forward_errors
from launch.reproduce.costs import (
    ACROSS,
    REAL,
    SMALL,
    Cost,
    cost_table,
    costs_of,
    replicas_table,
    tied_table,
    worst,
)
from launch.reproduce.grid import read_rows
from launch.reproduce.guard_table import FILES, guard_table
from launch.reproduce.page import draw_plots, page_of
from launch.reproduce.run import Row
from launch.reproduce.settings import SETTINGS
from launch.reproduce.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    "none": "all values, sent as soon as computed",
    "safe": "4 bits forward, 3 back",
    "balanced": "4 bits forward, 1.5 back",
    "aggressive": "2.5 bits forward, 1.5 back",
    "quant4": "4 bits, Hadamard",
    "topk10": "10 % of the values",
}
BETWEEN_REPLICAS = "replicas4-ef"
BASELINE = "stock"
STEPS = {
    BASELINE: "DeepSpeed alone",
    "none": "`none`, bit-identical losses",
    "bf16": "`bf16`",
    "quantize8": "`quantize`, 8 bits",
    **{name: f"`{name}`" for name in ("safe", "balanced", "aggressive")},
}
"""Names of settings in results/links.json, and in the table and the plot of step times."""
MARKS = {
    name: (f"<!-- {name}: begin; made by `make docs` -->", f"<!-- {name}: end -->")
    for name in (
        "recipes",
        "errors",
        "small",
        "tied",
        "long",
        "costs",
        "guard",
        "replicas",
        "replica-links",
        "steps",
        "links",
        "codecs",
    )
}


def all_links() -> dict[str, dict[str, Row]]:
    """Read the step times of recipes, by link, the slowest first."""
    links = dict[str, dict[str, Row]]()
    for row in json.loads((ROOT / "results" / "links.json").read_text()):
        links.setdefault(row["link"], {})[row["recipe"]] = row
    return dict(sorted(links.items(), key=lambda item: -item[1][BASELINE]["step_s"]))


def steps_table() -> str:
    """Compare step times of recipes over links, relative to DeepSpeed's on an unlimited link."""
    links = dict(reversed(all_links().items()))
    lines = [
        [name, *(f"{rows[recipe]['step_over_stock_unshaped']:.2f}" for rows in links.values())]
        for recipe, name in STEPS.items()
    ]
    table = markdown(["setting", *map(link_name, links)], lines, texts=1)
    return f"{table}\n\nProcessor: {next(iter(links.values()))[BASELINE]['processor']}."


def links_table() -> str:
    """Show all that was measured of each recipe on each link."""
    lines = []
    for link, rows in reversed(all_links().items()):
        for recipe, row in rows.items():
            chosen = f": {row['chosen']}" if row["chosen"] else ""
            same = " (same losses)" if row["losses_equal_stock"] and recipe != BASELINE else ""
            lines.append(
                [
                    link_name(link),
                    "DeepSpeed alone" if recipe == BASELINE else f"`{recipe}`{chosen}{same}",
                    str(row["depth_ran"]),
                    *(f"{row[key]:.3f}" for key in ("step_s", "predicted_step_s")),
                    *(f"{row[f'step_over_stock_{where}']:.2f}" for where in ("unshaped", "same_link")),
                    f"{row['wire_bytes'] / 1e6:.1f}",
                    f"{row['link_busy']:.0%}" if row["link_busy"] and not row["chosen"] else "",
                ]
            )
    header = ["link", "recipe", "depth", "step, s", "predicted, s", "step / baseline step, unlimited link"]
    return markdown([*header, "step / baseline step, same link", "MB a step", "link busy"], lines, texts=2)


def replica_links_table() -> str:
    """Show step times and bytes of gradients between two replicas, on the links of each dtype."""
    rows = json.loads((ROOT / "results" / "replica_links.json").read_text())
    lines = [
        [
            f"{row['mbit']:g} Mbit/s" if row["mbit"] else "unlimited",
            row["setting"].replace("stock", "DeepSpeed alone").replace(" ", ", ", 1),
            f"{row['step_s']:.3f}",
            f"{row['step_over_free']:.2f}",
            f"{row['wire_bytes'] / 1e6:.2f}",
            "" if "stock" in row["setting"] else f"{row['fewer_bytes']:.2f}",
        ]
        for row in rows
    ]
    header = [
        "link",
        "setting",
        "step, s",
        "step / baseline step, unlimited link",
        "MB a step",
        "times fewer",
    ]
    return f"{markdown(header, lines, texts=2)}\n\nProcessor: {rows[0]['processor']}."


def codec_speeds() -> str:
    """Say how fast some codecs are, from the table of codecs in docs/speed-tables.md."""
    page = (ROOT / "docs" / "speed-tables.md").read_text()
    section = page.partition("## Codecs on one core")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    speeds = {row[0]: row[4] for row in rows if len(row) == 9 and row[1] == "fp32"}
    named = {
        "4 bits": "`quantize(bits=4)`",
        "4 bits with Hadamard": "`quantize(bits=4, hadamard=True)`",
        "`topk` 10 %": "`topk()`",
        "`entropy`": "`entropy()`",
        "memcpy": "memcpy",
    }
    lines = [[name, speeds[key]] for name, key in named.items()]
    return markdown(["encode and decode", "GB/s"], lines)


def link_name(link: str) -> str:
    """Return the heading of a link in tables."""
    return "unlimited" if link == "unshaped" else link


def all_rows(presets: Sequence[str] = ACROSS) -> list[Row]:
    """Read the rows that recipes are judged by, or those of other presets."""
    return [row for preset in presets for row in read_rows(ROOT / "results" / f"{preset}.jsonl")]


def recipes_table() -> str:
    """Compare recipes on models that others pretrained."""
    lines = costs_of_recipes(["real"], REAL)
    header = [
        "recipe",
        "what it sends",
        "times fewer bytes",
        "promised, fine-tuned, %",
        *(f"{kind}, %" for kind in REAL),
    ]
    return f"""{markdown(header, lines, texts=2)}

- **Models**: SmolLM2 is a Llama of 135 million parameters with attention sinks, MiniLM a BERT of 22 million.
  Both: fine-tuned for 200 steps on WikiText-2, in four stages, SmolLM2's tied gradient exact.
- **Times fewer bytes**: than fp32. Of bf16 or fp16 messages lossy recipes save half as many times.
- **Percent**: the rise of the held-out loss, evaluated without compression / with it, against an uncompressed
  run of its seed; means over seeds. Of one seed, some tenths are noise. A merged adapter has the first.
- **Promised**: upper bound in 100 to 200 steps, kept by these and four small models, one of them kept aside.
  From scratch, width 128, only `safe` has one: 1 / 1 % in 1,200 steps; in 4,800 one of five runs lost 1.2."""


def small_table() -> str:
    """Compare recipes on small models that were trained here, and the key "replicas"."""
    lines = costs_of_recipes(["small", "wide"], SMALL)
    costs = costs_of(read_rows(ROOT / "results" / "replicas.jsonl"), BETWEEN_REPLICAS, ["replicas"])
    ratio = f"{statistics.fmean(each.ratio for each in costs):.1f}" if costs else ""
    own = [worst_of(costs, kind) for kind in SMALL]
    lines.append(["key `replicas`", "4 bits with error feedback, between replicas", ratio, *own])
    header = ["recipe", "what it sends", "times fewer bytes", *(f"{kind}, %" for kind in SMALL[:2])]
    return markdown([*header, f"{SMALL[2]}, points"], [line[:3] + line[-3:] for line in lines], texts=2)


def costs_of_recipes(presets: Sequence[str], kinds: Sequence[str]) -> list[list[str]]:
    """Return for each recipe its name, what it sends, times fewer bytes, promise for fine-tuning, and worst
    cost by kind."""
    rows, lines = all_rows(), []
    for name, what in RECIPES.items():
        evidence = EVIDENCE.get(name)
        if evidence is None or not (costs := costs_of(rows, evidence.row, presets)):
            continue
        promise = evidence.fine_tuned
        ratio = f"{statistics.fmean(each.ratio for each in costs):.1f}"
        promised = off_on(promise, "g") if promise else ""
        lines.append([f"`{name}`", what, ratio, promised, *(worst_of(costs, kind) for kind in kinds)])
    return lines


def worst_of(costs: Sequence[Cost], kind: str) -> str:
    """Show the largest cost of the tasks of a kind, and the fewest seeds where these are not three."""
    own = [cost for cost in costs if cost.kind == kind]
    if not own:
        return ""
    seeds = min(cost.seeds for cost in own)
    return off_on(worst(own), "+.2f") + ("" if seeds >= 3 else f", {seeds} seed{'s' * (seeds > 1)}")


def off_on(pair: tuple[float, float], form: str) -> str:
    """Show what evaluation costs without compression and with it."""
    return " / ".join(format(value, form) for value in pair)


def costs_table(presets: Sequence[str] = ACROSS) -> str:
    """Compare what all settings of several architectures cost."""
    rows = all_rows(presets)
    names = {row["setting"] for row in rows} - {"none"}
    known = dict.fromkeys(name for settings in SETTINGS.values() for name in settings if name in names)
    return cost_table(rows, [*known, *sorted(names - {*known})], presets)


def bandwidth_plot(image: Path) -> None:
    """Plot the step time of each setting on each link, a bar for each setting."""
    links = dict(reversed(all_links().items()))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.9 / len(STEPS)
    for number, (recipe, name) in enumerate(STEPS.items()):
        steps = [rows[recipe]["step_over_stock_unshaped"] for rows in links.values()]
        left = [place + number * width for place in range(len(links))]
        bars = axes.bar(left, steps, 0.9 * width, label=name.replace("`", ""))
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks([place + 0.45 - width / 2 for place in range(len(links))], map(link_name, links))
    axes.set_xlabel("link between the stages")
    axes.set_ylabel("step / baseline step, unlimited link")
    axes.legend(fontsize=8)
    figure.savefig(image, dpi=120, metadata={"Software": None})


def commands_page() -> str:
    """Document every command, from its parser."""
    os.environ["COLUMNS"] = "100"  # argparse wraps at the width of the terminal
    parts = [
        "# Commands\n\nYou get every option of `ds-compress`. `ds-compress COMMAND --help` prints the same.\n"
    ]
    parts.append(
        "```bash\nds-compress list\nds-compress check ds_config.json --stages 2 --shape 8,128,256\n```\n"
    )
    actions = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    tasks = [(each.help, f"[`{each.dest}`](#{each.dest})") for each in actions[0]._choices_actions]
    parts.append(markdown(["You want to", "Command"], tasks, texts=2) + "\n")
    for name, command in actions[0].choices.items():
        parts.append(f"## {name}\n\n```text\n{command.format_help().strip()}\n```\n")
    return "\n".join(parts)


def metrics_page() -> str:
    """Document every label that the monitor writes."""
    parts = [
        "# Metrics\n\nYou get every label that the monitor writes to W&B, TensorBoard and CSV. "
        "[Monitor](monitoring.md) explains them.\n"
    ]
    parts.append('```json\n"ds_compress": {"recipe": "safe", "monitor": {"every": 10}}\n```\n')
    for title, where, names in (
        ("Of each boundary and direction", f"{metrics.PREFIX}/boundary_0/forward/", metrics.CHANNEL),
        ("Of the pipeline", f"{metrics.PREFIX}/", metrics.PIPELINE),
        (
            "Of gradients between replicas; of tied weights the same with `tied`",
            metrics.exchange_label("replicas", 0, ""),
            metrics.EXCHANGE,
        ),
        ("Of evaluations", f"{metrics.PREFIX}/", metrics.EVALUATIONS),
    ):
        meanings = {name: meaning.replace("|", r"\|") for name, meaning in names.items()}  # no new column
        rows = "\n".join(f"| `{where}{name}` | {meaning} |" for name, meaning in meanings.items())
        parts.append(f"## {title}\n\n| label | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def pages() -> Iterator[tuple[Path, str]]:
    """Give every page with the text it should have."""
    judged = [row for preset in FILES for row in read_rows(ROOT / "results" / f"{preset}.jsonl")]
    errors = read_rows(ROOT / "results" / "forward_errors.jsonl")
    parts = {
        "recipes": recipes_table(),
        "small": small_table(),
        "tied": tied_table(all_rows(["real", "tied"])),
        "long": costs_table(["long"]),
        "errors": f"{forward_errors.correlations(errors)}\n\n{forward_errors.budgets(errors)}",
        "costs": costs_table(["real", "small", "wide"]),
        "guard": guard_table(judged),
        "replicas": replicas_table(read_rows(ROOT / "results" / "replicas.jsonl")),
        "replica-links": replica_links_table(),
        "steps": steps_table(),
        "links": links_table(),
        "codecs": codec_speeds(),
    }
    pages = {
        "README.md": ["recipes"],
        "docs/evidence.md": ["recipes", "errors", "long", "tied", "small"],
        "docs/cost-tables.md": ["costs", "guard"],
        "docs/replicas.md": ["replicas", "replica-links"],
        "docs/speed.md": ["steps", "codecs"],
        "docs/speed-tables.md": ["links"],
    }
    for page, names in pages.items():
        text = (ROOT / page).read_text()
        for name in names:
            begin, end = MARKS[name]
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n\n{parts[name]}\n\n{end}{rest.partition(end)[2]}"
        yield ROOT / page, text
    yield ROOT / "docs" / "evidence-tables.md", page_of(ROOT / "results")
    command = [sys.executable, "-m", "ds_compress", "list", "--markdown"]
    options = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    yield ROOT / "docs" / "options.md", options.stdout
    yield ROOT / "docs" / "commands.md", commands_page()
    yield ROOT / "docs" / "metrics.md", metrics_page()


def main() -> int:
    form = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    args = form.parse_args()
    stale = [(page, text) for page, text in pages() if not page.exists() or page.read_text() != text]
    if args.check:
        for page, _ in stale:
            print(f"{page.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for page, text in stale:
        page.write_text(text)
    bandwidth_plot(ROOT / "docs" / "images" / "bandwidth.png")
    draw_plots(ROOT / "results", ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
