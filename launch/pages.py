"""Write what README.md and docs/ repeat from results, options and commands: `make docs`.

    python launch/pages.py [--check]

README.md and docs/evidence.md: the table of recipes, from results/*.jsonl and the tables of
docs/speed-tables.md.
docs/images/bandwidth.png: step time against bandwidth, from docs/speed-tables.md.
docs/options.md, commands.md, metrics.md: from the options, parsers and labels of the package.
`--check` writes nothing and exits with 1 if a page differs from what would be written.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ds_compress.cli import parser
from ds_compress.config.recipes import EVIDENCE
from ds_compress.monitor import metrics
from launch.reproduce.grid import read_rows
from launch.reproduce.tables import Setting, grouped, markdown

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    "none": "fp32, sent as soon as computed",
    "safe": "4 bits, Hadamard",
    "balanced": "3 bits, Hadamard",
    "aggressive": "2.5 bits, entropy coded",
    "auto": "the fastest within an error budget",
}
BASELINE = "stock"
MARKS = ("<!-- recipes: begin; made by `make docs` -->", "<!-- recipes: end -->")


def speed_table(heading: str) -> list[dict[str, str]]:
    """Read the first table below `heading` in docs/speed-tables.md, a row each."""
    text = (ROOT / "docs" / "speed-tables.md").read_text().split(f"{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row)) for row in rows]


def recipes_table() -> str:
    """Compare recipes: bytes and losses from results/, step times from docs/speed-tables.md."""
    settings = grouped(read_rows(ROOT / "results" / "cpu.jsonl"), "cpu")
    steps = speed_table("### What `auto` chooses")
    slow = next(row["link"] for row in steps if row["link"] != "unshaped")
    ratios = {
        row["recipe"].split("`")[1 if "`" in row["recipe"] else 0]: row
        for row in steps
        if row["link"] == slow
    }
    baseline, safe = (ratios[name]["/ stock, unshaped"] for name in (BASELINE, "safe"))
    none, compressed = (settings["language", EVIDENCE[name].row] for name in ("none", "safe"))
    before = f"{none.metric('on').mean:.3f}"
    on, off = on_off(compressed, 3).split(" / ")
    rows = []
    for name, what in RECIPES.items():
        step = ratios.get("auto-safe" if name == "auto" else name, {}).get("/ stock, unshaped", "")
        if name in EVIDENCE:
            gpt, resnet = (settings[task, EVIDENCE[name].row] for task in ("language", "vision"))
            rows.append([f"`{name}`", what, f"{gpt.ratio:.1f}", step, on_off(gpt, 3), on_off(resnet, 1)])
        else:
            rows.append([f"`{name}`", what, "", step, "", ""])
    header = ["recipe", "what it sends", "times fewer bytes", f"step time at {slow}"]
    table = markdown([*header, "fine-tuned GPT, perplexity", "ResNet, accuracy, %"], rows, texts=2)
    return f"""{table}

For example, `safe` sends {compressed.ratio:.1f} times fewer bytes. At {slow} its step takes {safe} times
as long as DeepSpeed's step on an unlimited link; DeepSpeed alone takes {baseline} times as long. The GPT's
perplexity rises from {before} to {on} if evaluation compresses messages too, and is {off} if it does not
(the number after the slash). Means of three seeds or more (WikiText-2, per byte; CIFAR-10).
Empty: depends on what `auto` chooses, or not measured."""


def on_off(setting: Setting, digits: int) -> str:
    """Show the metric with compression in evaluation and without."""
    on, off = (f"{setting.metric(way).mean:.{digits}f}" for way in ("on", "off"))
    return on if setting.name == "none" else f"{on} / {off}"


def bandwidth_plot(image: Path) -> None:
    """Plot the step time of each setting against the bandwidth of the link."""
    names = {
        BASELINE: "DeepSpeed alone",
        "`none` (same losses)": "none",
        "`bf16`": "bf16",
        "`quantize8`": "8 bits",
        "`quantize4`": "4 bits",
        "`quantize2`": "2 bits",
    }
    rows = speed_table("## Two hosts and a slow link")
    links = list(dict.fromkeys(row["link"] for row in rows))[::-1]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for recipe, name in names.items():
        steps = {row["link"]: float(row["/ stock, unshaped"]) for row in rows if row["recipe"] == recipe}
        axes.plot(range(len(links)), [steps[link] for link in links], "o-", label=name)
    axes.set_xticks(range(len(links)), ["unlimited" if link == "unshaped" else link for link in links])
    axes.set_xlabel("link between the stages")
    axes.set_ylabel("step time / DeepSpeed, unlimited link")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
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
        ("Of gradients between replicas", metrics.replicas_label(0, ""), metrics.REPLICAS),
        ("Of evaluations", f"{metrics.PREFIX}/", metrics.EVALUATIONS),
    ):
        meanings = {name: meaning.replace("|", r"\|") for name, meaning in names.items()}  # no new column
        rows = "\n".join(f"| `{where}{name}` | {meaning} |" for name, meaning in meanings.items())
        parts.append(f"## {title}\n\n| label | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def pages() -> Iterator[tuple[Path, str]]:
    """Give every page with the text it should have."""
    for page in (ROOT / "README.md", ROOT / "docs" / "evidence.md"):
        before, _, rest = page.read_text().partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        yield page, f"{before}{MARKS[0]}\n\n{recipes_table()}\n\n{MARKS[1]}{after}"
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
