"""What errors of activations do to a loss: many codecs on trained models, without training.

    python launch/forward_errors.py --data FOLDER [--tasks real/smollm2-full small/llama-finetuned ...]

Each codec decodes the activations at the three boundaries of a task's model (launch/reproduce/presets.py), as
it is before a run. A row has the error of a message and the token error (`ds_compress.codecs.message_error`),
means over boundaries and batches, and the rise of the held-out loss. The last table has the rank correlations
(Spearman) of both errors with that rise. Rows are kept in results/forward_errors.jsonl.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ds_compress.codec import Codec, Context, TensorSpec, build
from ds_compress.codecs.message_error import MessageError, compare
from ds_compress.config.recipes import LIMITS
from launch.reproduce.grid import append_row, read_rows
from launch.reproduce.run import Row, environment, task_of
from launch.reproduce.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cpu")
CODECS: tuple[dict[str, Any], ...] = (
    *({"name": "entropy", "bits": bits} for bits in (1.5, 2, 2.5, 3, 3.3, 4, 5)),
    *({"name": "entropy", "bits": bits, "rank": 8} for bits in (2.5, 3.3, 4)),
    *({"name": "entropy", "bits": bits, "rounding": "dither"} for bits in (2, 3, 4, 5)),
    *({"name": "quantize", "bits": bits} for bits in (2, 3, 4, 6, 8)),
    *({"name": "quantize", "bits": bits, "hadamard": True} for bits in (3, 4, 5, 6)),
    *({"name": "minmax", "bits": bits} for bits in (4, 6, 8)),
    *({"name": "topk", "density": density} for density in (0.1, 0.3, 0.5)),
    {"name": "fp8", "format": "e4m3"},
    {"name": "bf16"},
)
TASKS = ("real/smollm2-full", "small/llama-finetuned", "small/gpt-finetuned", "small/neox-finetuned")


class RoundTrip(nn.Module):
    """A boundary: returns what its codec decodes, and adds up the errors; without a codec, what came."""

    def __init__(self) -> None:
        super().__init__()
        self.codec: Codec | None = None
        self.errors: list[Tensor] = []  # of `MessageError`, a tensor for each message

    def forward(self, x: Tensor) -> Tensor:
        if self.codec is None:
            return x
        context = Context(micro_batch=len(self.errors))
        arrived = self.codec.decode(self.codec.encode(x, context), TensorSpec.of(x), context)
        self.errors.append(compare([x], [arrived]))
        return arrived


@torch.no_grad()
def measure(name: str, codecs: list[dict[str, Any]], data: Path, cache: Path, blocks: int) -> Iterator[Row]:
    """Yield a row for each of `codecs` on the task of this name."""
    task: Any = task_of(*name.split("/"), data, cache)  # of language
    with torch.enable_grad():
        task.prepare()  # trains a small model first, once
    first, *others = task.stages(0)
    boundaries = [RoundTrip() for _ in others]
    pairs = zip(boundaries, others, strict=True)
    model = nn.Sequential(first, *itertools.chain.from_iterable(pairs)).eval()
    plain = task.predict(model, DEVICE, blocks)[0]
    for options in codecs:
        for boundary in boundaries:
            boundary.codec, boundary.errors = build(options), []
        loss = task.predict(model, DEVICE, blocks)[0]
        errors = torch.stack([error for boundary in boundaries for error in boundary.errors]).mean(0)
        mean = MessageError(*errors.tolist())
        for boundary in boundaries:
            boundary.codec = None
        yield {
            "task": name,
            "codec": options,
            "blocks": blocks,
            "relative_error": mean.relative_error,
            "token_error": mean.token_error,
            "loss_rise": 100 * (loss / plain - 1),  # percent
            **environment(DEVICE),
        }


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of two series without ties."""
    ranks = torch.stack([series.argsort().argsort().double() for series in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def table(rows: list[Row]) -> str:
    """All rows, each task's from the largest token error to the smallest."""
    lines = [
        [
            row["task"],
            f"`{build(row['codec'])}`",
            *(f"{row[f'{kind}_error']:.4f}" for kind in ("relative", "token")),
            f"{row['loss_rise']:+.3f}",
        ]
        for row in sorted(rows, key=lambda row: (row["task"], -row["token_error"]))
    ]
    return markdown(["task", "codec", "error of a message", "token error", "loss, %"], lines, texts=2)


def correlations(rows: list[Row]) -> str:
    """The rank correlations of each task, and of all rows together."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    lines = []
    for name in (*tasks, "all together"):
        own = [row for row in rows if name in (row["task"], "all together")]
        columns = [
            torch.tensor([row[key] for row in own], dtype=torch.float64)
            for key in ("relative_error", "token_error", "loss_rise")
        ]
        cells = [f"{rank_correlation(errors, columns[2]):.3f}" for errors in columns[:2]]
        lines.append([name, str(len(own)), *cells])
    return markdown(["task", "codecs", "error of a message", "token error"], lines)


def budgets(rows: list[Row]) -> str:
    """The largest rise of the loss that any codec within each error budget of `auto` causes, by task."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    lines = []
    for quality, limits in LIMITS.items():
        own = [row for row in rows if row["token_error"] <= limits.forward]
        rises = [[row["loss_rise"] for row in own if row["task"] == name] for name in tasks]
        if any(rises):
            cells = (f"{max(each):+.2f} ({len(each)} codecs)" if each else "" for each in rises)
            lines.append([f"`{quality}`", f"{limits.forward:g}", *cells])
    return markdown(["quality", "token error", *(f"{name}, %" for name in tasks)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What errors of activations do to a loss.")
    parser.add_argument("--data", type=Path, help="folder with the data sets; needed to run anything")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default: results/")
    parser.add_argument(
        "--tasks", nargs="*", default=TASKS, metavar="PRESET/TASK", help="default: %(default)s"
    )
    parser.add_argument("--blocks", type=int, default=16, help="of held-out text (default: %(default)s)")
    args = parser.parse_args()
    file = args.results / "forward_errors.jsonl"
    torch.set_num_threads(1)
    for name in args.tasks:
        rows = [row for row in read_rows(file) if (row["task"], row["blocks"]) == (name, args.blocks)]
        left = [codec for codec in CODECS if all(row["codec"] != codec for row in rows)]
        if left and args.data is None:
            parser.error("--data is needed: the folder with wikitext2/")
        for row in measure(name, left, args.data, args.results / "cache", args.blocks) if left else ():
            append_row(file, row)
            print(name, row["codec"], f"{row['token_error']:.4f} {row['loss_rise']:+.3f} %", flush=True)
    rows = [row for row in read_rows(file) if row["blocks"] == args.blocks]
    print(table(rows), correlations(rows), budgets(rows), sep="\n\n")


if __name__ == "__main__":
    main()
