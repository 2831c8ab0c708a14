"""Measure what token ids would predict of activations: `python -m launch.reproduce.token_ids --data FOLDER`.

Both sides of a boundary could keep a running mean of the decoded rows of each token id, and code only the
difference. A Llama with 8 blocks of width 256 trains on WikiText-2 in 8,000 tokens of GPT-2, the most
frequent ones and one for all others: first from random weights, then further on other text at a fifth of the
learning rate. Behind each block, rows are compared with the mean of their id, which is that of earlier
batches.

    unexplained     energy of the differences, as a share of that of the rows
    bits saved      of each value, at one error: what entropy coding in the eigenbasis of the rows takes, less
                    what it takes in the eigenbasis of the differences, less the ids (16 bits a row)
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

from launch.reproduce.architectures import Head, LlamaBlock
from launch.reproduce.grid import append_row, read_rows
from launch.reproduce.run import Row, environment
from launch.reproduce.tables import markdown
from launch.reproduce.task import existing, generator

VOCABULARY, WIDTH, BLOCKS, HEADS = 8_000, 256, 8, 8
BATCH, SEQ = 4, 128
CHARACTERS = 4_000_000  # of train.txt: nine tenths for the first phase
PHASES = {"from scratch": (200, 2e-3), "further on other text": (100, 4e-4)}
"""Steps and learning rate; the last `MEASURED` steps of each are measured."""
MEASURED = 40
NEW = 0.1  # least weight of the rows of a batch in a mean: activations drift while weights change
RESULTS = Path(__file__).resolve().parents[2] / "results"
ERRORS = (0.03, 0.06)  # relative: of the recipes "balanced" and "aggressive"
ID_BITS = 16


class Means:
    """Running mean of the rows of each token id."""

    def __init__(self) -> None:
        self._means = torch.zeros(VOCABULARY, WIDTH)
        self._batches = torch.zeros(VOCABULARY)

    def difference(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return rows less the mean of their id, then add them; fp32 [rows, WIDTH]."""
        left = rows - self._means[ids]
        count = torch.bincount(ids, minlength=VOCABULARY).unsqueeze(1)
        present = count.squeeze(1) > 0
        sums = torch.zeros_like(self._means).index_add_(0, ids, left)
        self._batches += present
        weight = (1 / self._batches.clamp(min=1)).clamp(min=NEW).unsqueeze(1)
        self._means[present] += (weight * sums / count.clamp(min=1))[present]
        return left


def rate(moment: Tensor, distortion: float) -> float:
    """Return the bits of a value of a Gaussian with this second moment, by reverse water-filling.

    Args:
        moment: float64 [WIDTH, WIDTH].
        distortion: of all values of a row together, in the unit of the moment's trace.
    """
    variances = torch.linalg.eigvalsh(moment).clamp(min=0)
    low, high = 0.0, variances.max().item()
    for _ in range(60):
        level = (low + high) / 2
        low, high = (level, high) if variances.clamp(max=level).sum() < distortion else (low, level)
    return (variances.clamp(min=high) / high).log2().sum().item() / 2 / len(variances)


def tokens(data: Path) -> Tensor:
    """Return the ids of the text, int64 [tokens], the most frequent first."""
    text = existing(data / "wikitext2" / "train.txt", "text").read_text()[:CHARACTERS]
    found = AutoTokenizer.from_pretrained(existing(data / "gpt2_tokenizer", "tokenizer"))(text)["input_ids"]
    _, ids, counts = torch.tensor(found).unique(return_inverse=True, return_counts=True)
    rank = counts.argsort(descending=True).argsort()
    return rank[ids].clamp(max=VOCABULARY - 1)


def train(data: Path) -> Iterator[Row]:
    """Train in both phases; yield a row for each phase and block."""
    torch.manual_seed(0)
    body = [LlamaBlock(WIDTH, HEADS) for _ in range(BLOCKS)]
    head = Head(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False))
    layers = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH), *body, head])
    for module in layers.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    text = tokens(data)
    split = int(0.9 * len(text))
    for (phase, (steps, lr)), own in zip(PHASES.items(), (text[:split], text[split:])):
        optimizer = torch.optim.AdamW(layers.parameters(), lr=lr)
        drawing, window = generator(1), torch.arange(SEQ + 1)
        means = [Means() for _ in body]
        moments = torch.zeros(BLOCKS, 2, WIDTH, WIDTH, dtype=torch.float64)
        for step in range(steps):
            starts = torch.randint(len(own) - SEQ, (BATCH, 1), generator=drawing)
            block = own[starts + window]
            loss, seen = _pass(layers, block[:, :-1], block[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ids = block[:, :-1].flatten()
            for number, x in enumerate(seen):
                left = means[number].difference(ids, x)
                if step >= steps - MEASURED:
                    moments[number] += torch.stack([(each.T @ each).double() for each in (x, left)])
            if step % 50 == 0:
                print(f"{phase}, step {step}: loss {loss.item():.3f} a token", flush=True)
        yield from (_row(phase, number, *own, loss.item()) for number, own in enumerate(moments))


def _pass(layers: Sequence[nn.Module], ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and the rows behind each block, fp32 [rows, WIDTH]."""
    x, seen = layers[0](ids), []
    for block in layers[1:-1]:
        x = block(x)
        seen.append(x.detach().flatten(0, 1))
    return F.cross_entropy(layers[-1](x).flatten(0, 1), labels.flatten()), seen


def _row(phase: str, number: int, rows: Tensor, left: Tensor, loss: float) -> Row:
    energy = rows.trace().item()
    saved = {
        f"saved_{error:g}": rate(rows, error**2 * energy) - rate(left, error**2 * energy) - ID_BITS / WIDTH
        for error in ERRORS
    }
    unexplained = left.trace().item() / energy
    found = {"phase": phase, "block": number + 1, "loss": loss, "unexplained": unexplained, **saved}
    bits = {f"bits_{error:g}": rate(rows, error**2 * energy) for error in ERRORS}
    return found | bits | environment(torch.device("cpu"))


def table(rows: Sequence[Row]) -> str:
    """Format rows of `train` in Markdown."""
    header = ["phase", "behind block", "unexplained energy"]
    header += [f"bits at error {error:g}, and saved by ids" for error in ERRORS]
    return markdown(
        header,
        (
            [
                row["phase"],
                row["block"],
                f"{row['unexplained']:.2f}",
                *(f"{row[f'bits_{error:g}']:.2f}, {row[f'saved_{error:g}']:+.2f}" for error in ERRORS),
            ]
            for row in rows
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="token_ids", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2/, gpt2_tokenizer/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.results / "token_ids.jsonl"
    file.unlink(missing_ok=True)
    for row in train(args.data):
        append_row(file, row)
    print(table(read_rows(file)))


if __name__ == "__main__":
    main()
