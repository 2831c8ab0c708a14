"""Write docs/evidence-tables.md and its plots from the rows in results/."""

from collections.abc import Iterable
from pathlib import Path

from launch.reproduce import token_ids
from launch.reproduce.grid import read_rows
from launch.reproduce.orderings import SERIOUS, Costs, Settings, Verdict, check_claims
from launch.reproduce.plots import pareto_plot
from launch.reproduce.presets import PRESETS
from launch.reproduce.run import Row
from launch.reproduce.tables import METRICS, Setting, front, grouped, markdown, matrix, table

WITHIN = 1.0  # points of accuracy, percent of perplexity
SEEDS = 3  # that a row which carries a claim has at least
PLOTTED = "vision", "language"
HEAD = """# All rows of the evidence

You find here what every measured setting cost, in tables by preset, task and setting: accuracy or perplexity
with and without compression, bytes and errors. [Evidence](evidence.md) sums them up, and
[Cost tables](cost-tables.md) compares several models. Perplexities, and costs in
percent, above 1000 are printed as "> 1000".

Made by `make docs` from the rows in `results/`.
A row holds the block, the sizes, the seed, the processor and the releases that made it;
`python launch/reproduce.py --data FOLDER --only TASK/SETTING --seed N` makes it again.

- Four stages, three boundaries, fp32, in `simulate`, whose losses are those of a real pipeline bit for bit.
- On and off: the state that training ended in, the last and not the best one, evaluated with messages
  compressed (without feedback) and as they are.
- Bits for each value and bytes are what was sent in training: warm-up, first visits of AQ-SGD and headers
  included.
- Gradients are clipped at 1.0 in the language task, DeepSpeed's default, and not in the vision task, as in
  the paper. As in DeepSpeed's pipelines in fp32 the norm is that of the first stage's gradients.
- Generated text: its perplexity to the model before fine-tuning, drawn after prompts of held-out text.
- What `auto` chooses depends on the link. Its rows have one so slow that bytes alone decide: it takes the
  fewest that the error budget allows. `chosen` in a row has the choice and its errors.
  [All tables](speed-tables.md) has its losses over a real link, time to a loss included.
- Presets `small` and `wide` train several architectures, fine-tuned and from scratch, for which
  [Evidence](evidence.md) compares costs.
- Preset `revisits` is `cpu` with six epochs of the language task instead of four: AQ-SGD sends changes
  of samples that come back.
- Rows with `dither` in their name up to release 0.3 were made with earlier random draws
  ([Evidence](evidence.md)).
- ± is half of what lies between the largest and the smallest seed. A row of one seed carries no claim.
"""


def write_page(results: Path, page: Path) -> None:
    """Write `page`, with plots beside it in images/, from all rows in `results`."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_of(results))
    draw_plots(results, page.parent)


def draw_plots(results: Path, folder: Path) -> None:
    """Draw the plots of the page into images/ in its `folder`."""
    rows = _rows(results)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        settings = grouped(rows, preset)
        for task in PLOTTED:
            if (task, "none") in settings:
                pareto_plot(_of_task(settings, task), folder / _image(preset, task))


def page_of(results: Path) -> str:
    """Return the text of the page of all rows in `results`."""
    rows = _rows(results)
    parts = [HEAD]
    for preset in dict.fromkeys(row["preset"] for row in rows):
        settings = grouped(rows, preset)
        tasks = [task for task in METRICS if (task, "none") in settings]
        parts.append(
            f"## Preset `{preset}`\n\n{environment(row for row in rows if row['preset'] == preset)}\n"
        )
        parts += [_task(settings, task, preset) for task in tasks]
        verdicts = [verdict for verdict in check_claims(settings) if verdict.task in tasks]
        if any(verdict.held is not None for verdict in verdicts):
            parts.append(f"### The orderings of the paper\n\n{_orderings(verdicts)}\n")
    launched = read_rows(results / "launched.jsonl")
    if launched:
        parts.append(f"## Real pipelines\n\n{_launched(launched)}\n")
    ids = read_rows(results / "token_ids.jsonl")
    if ids:
        parts.append(f"## What token ids predict\n\n{token_ids.__doc__}\n{token_ids.table(ids)}\n")
    return "\n".join(parts)


def _rows(results: Path) -> list[Row]:
    rows = [row for preset in PRESETS for row in read_rows(results / f"{preset}.jsonl")]
    if not rows:
        raise SystemExit(f"reproduce: no rows in {results}; run a grid first")
    return rows


def _of_task(settings: Settings, task: str) -> list[Setting]:
    return [setting for (of, _), setting in settings.items() if of == task]


def _image(preset: str, task: str) -> str:
    return f"images/evidence_{preset}_{task}.png"


def environment(rows: Iterable[Row]) -> str:
    """List the machines and releases that computed `rows`, each once."""
    places = [
        f"{row['processor']}; " + ", ".join(f"{n} {v}" for n, v in row["versions"].items()) for row in rows
    ]
    return "\n".join(f"- {places.count(place)} rows on {place}" for place in dict.fromkeys(places))


def _task(settings: Settings, task: str, preset: str) -> str:
    own = _of_task(settings, task)
    parts = [f"### {task}, {len(own)} settings", table(own)]
    for evaluated in ("on", "off"):
        found = matrix(settings, task, evaluated)
        if found:
            parts.append(f"Min-max quantization, {METRICS[task]} {evaluated}:\n\n{found}")
    if task in PLOTTED:
        parts.append(f"![quality against bytes]({_image(preset, task)})")
    parts.append(_recipes(settings, task, own))
    return "\n\n".join(parts) + "\n"


def _recipes(settings: Settings, task: str, own: list[Setting]) -> str:
    """List the settings on the Pareto front: no other has fewer bytes and costs less."""
    costs = Costs(settings, task)

    def cost(setting: Setting) -> float:
        return min(costs.of(setting.name, evaluated) for evaluated in ("on", "off"))

    rows = []
    for setting in front(own, lambda each: -cost(each)):
        verdict = "within the spread" if cost(setting) <= costs.spread else ""
        if not verdict and cost(setting) <= WITHIN:
            verdict = "within 1 %" if METRICS[task] == "perplexity" else "within 1 point"
        seeds = len(setting.rows)
        number = "1 seed" if seeds == 1 else f"{seeds} seeds"
        claim = verdict if seeds >= SEEDS else f"{verdict} ({number}, no claim)".strip()
        rows.append((f"`{setting.name}`", f"{setting.ratio:.1f}", f"{cost(setting):.2f}", claim))
    header = [
        "not beaten in bytes and quality at once",
        "times fewer bytes",
        "costs",
        "against no compression",
    ]
    unit = "points of accuracy" if METRICS[task] == "accuracy" else "percent of perplexity"
    seeds = len(settings[task, "none"].rows)
    baseline = (
        f"Without compression {costs.baseline:.2f}, {costs.spread:.2f} {unit} between the best and the worst "
        f"of {seeds} seeds. Costs are {unit}, the better of on and off."
    )
    return f"{baseline}\n\n{markdown(header, rows)}"


def _orderings(verdicts: list[Verdict]) -> str:
    text = (
        "Costs against the mean of the uncompressed runs: points of accuracy (vision) or percent of "
        f"perplexity (language); serious is more than {SERIOUS:.0f}.\n\n"
    )
    rows = [(f"{v.number}. {v.claim}", v.task, v.word, v.numbers) for v in verdicts]
    return text + markdown(["ordering", "task", "here", "costs"], rows).replace("---:", "---")


def _launched(rows: list[Row]) -> str:
    lines = [
        (f"{row['task']}/{row['setting']}", row["seed"], row["stages"], row["steps"],
         "equal" if row["losses_equal"] else f"differ from step {row['first_difference']}",
         "equal" if row["bytes_equal"] else "differ")
        for row in rows
    ]  # fmt: skip
    header = ["run", "seed", "ranks", "steps", "losses against `simulate`", "bytes"]
    return f"{environment(rows)}\n\n{markdown(header, lines)}"
