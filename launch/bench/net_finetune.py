"""Measure fine-tuning over a slow link between two hosts, uncompressed and with recipes. Needs root.

    python launch/bench/net_finetune.py [--rates 100 1000] [--recipes balanced safe auto] [--steps 24]
                                        [--out FOLDER]
    python launch/bench/net_finetune.py --model FOLDER --text FILE [--full] [--slower 2.5 5] [--picture FILE]

The hosts are two network namespaces (two_hosts.sh) with one core and one stage each, which run `deepspeed
--module ds_compress.hf.finetune`. Without --model, the model is an fp32 Llama with random weights, two layers
and hidden size 512: so thin that a core computes as many tokens a second as a link of 100 Mbit/s carries
uncompressed. Its sequences have 512 tokens, and a step has 16 micro-batches of one. With --model, it is the
checkpoint in FOLDER, in fp32, on sequences of 256 tokens of FILE, 4 to a step. LoRA trains adapters of rank 8
at all projections of queries and values, --full all weights. OUT/rows.json and a table on standard output
have, for each link and recipe,

    tokens_per_second    of the fastest step after the first ones; other programs slow some steps down
    median               of the tokens per second of these steps
    predicted            what `ds-compress advise --finetune` says, from the compute times of DeepSpeed alone
                         on an unlimited link; null with "auto"
    over_stock           `median` over that of DeepSpeed alone on this link
    of_free              `median` over that of DeepSpeed alone on an unlimited link
    bytes_per_token      of all steps and two evaluations of a sequence, both directions, with TCP and IP
                         headers; with "auto" they include its first steps, which are uncompressed
    loss                 mean of the last five steps
    losses, seconds      of each step; of the first steps too
    load                 mean number of processes that wanted a core during the last minute of the run

--picture draws the losses over the seconds.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.net_runs import BASELINE, LAUNCH, PAYLOAD, STAGE_TIMES, WARM_UP, Wire, run, stage_times

WORDS = 1000
THIN = 512  # hidden size of the model with random weights, and tokens of a sequence
MEAN = 5  # steps
MOST_STEPS = 25  # up to here the log has a line for each
SPEED = re.compile(r"training: (\d+)/\d+ steps,[^\n]*? tokens/s=(\d+)")


def save_model(folder: Path) -> None:
    """Create a checkpoint and a tokenizer that knows the words of `generate_text`."""
    known = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=known, unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=THIN,
        intermediate_size=THIN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=1024,
        max_position_embeddings=THIN,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def generate_text(words: int) -> str:
    """Generate text in which each word is followed by one of four words."""
    draw = random.Random(0)
    follows = [[draw.randrange(WORDS) for _ in range(4)] for _ in range(WORDS)]
    found = [0]
    while len(found) < words:
        found.append(draw.choice(follows[found[-1]]))
    return " ".join(f"w{number}" for number in found)


@dataclass(frozen=True)
class Task:
    """What is trained: a checkpoint on a text, with how many tokens a sequence and sequences a step."""

    model: Path
    text: Path
    length: int
    micro_batches: int
    lora: bool
    lr: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.micro_batches

    @property
    def megabits(self) -> float:
        """Of what a stage waits for in a step, uncompressed: messages of both directions, and the gradient of
        a tied embedding, of which both stages send at the same time."""
        config = json.loads((self.model / "config.json").read_text())
        is_tied = config.get("tie_word_embeddings") and not self.lora
        values = 2 * self.tokens + (config["vocab_size"] if is_tied else 0)
        return 32 * values * config["hidden_size"] / 1e6

    def settings(self, folder: Path, recipe: str, steps: int) -> dict[str, Any]:
        """Return train.json of a run in `folder`."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 0.0,
            "steps_per_print": 1000000,
            "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "torch_adam": True}},
        }
        if recipe != BASELINE:
            config["ds_compress"] = {"recipe": recipe}
        adapters = {"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}} if self.lora else {}
        return {
            "model": str(self.model),
            "out": str(folder / "run"),
            "data": {"train": str(self.text), "documents": "file", "packing": "joined"},
            **adapters,
            "sequence_length": self.length,
            "steps": steps,
            "eval_sequences": 1,
            "ds_config": config,
        }


def launch(folder: Path, wire: Wire, settings: dict[str, Any], through: Sequence[str] = ()) -> list[str]:
    """Run train.json by a program that takes the module and its arguments; return the output lines."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "train.json"
    file.write_text(json.dumps(settings))
    words = [str(LAUNCH / "two_hosts.sh"), *through, "--module", "ds_compress.hf.finetune", str(file)]
    log, succeeded = run(words, folder, wire, 1)
    if not succeeded:
        sys.exit("\n".join([*log[-20:], f"net_finetune: {words[0]} failed; all output: {folder / 'log'}"]))
    return log


def profile(out: Path, task: Task, steps: int) -> list[str]:
    """Measure the compute times of the stages, and return them as options of `ds-compress advise`."""
    folder = out / "profile"
    log = launch(folder, Wire(), task.settings(folder, BASELINE, steps), [STAGE_TIMES])
    stages = stage_times(log)
    # The step of the other stage waits for this one's last backward pass
    options = ["--step-ms", str(min(stage["step_ms"] for stage in stages))]
    for direction in ("forward", "backward"):
        times = ",".join(str(stage[f"{direction}_ms"]) for stage in stages)
        options += [f"--{direction}-ms", times]
    return options


def predict(folder: Path, task: Task, recipe: str, mbit: float, times: Sequence[str]) -> float | None:
    """Return the tokens per second that `ds-compress advise` predicts for the run in `folder`."""
    if recipe == "auto":
        return None
    config = folder / "ds_config.json"
    block = {"recipe": "none" if recipe == BASELINE else recipe}
    config.write_text(json.dumps({"ds_compress": block}))
    words = [
        sys.executable,
        "-m",
        "ds_compress",
        "advise",
        "--finetune",
        str(folder / "train.json"),
        *times,
        "--json",
    ]
    words += ["--gbps", str(mbit / 1e3 * PAYLOAD), "--recipe", str(config)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout)["rows"][0 if recipe == BASELINE else 1]
    return task.tokens / float(row["step_s"])


def train(
    out: Path, task: Task, recipe: str, mbit: float | None, steps: int, times: Sequence[str]
) -> dict[str, Any]:
    """Run one training and return its row; the log stays in `out`."""
    folder = out / (f"{recipe}-{mbit:g}mbit" if mbit else "free")
    log = launch(folder, Wire(mbit), task.settings(folder, recipe, steps))
    speeds = {int(step): int(speed) for step, speed in SPEED.findall("\n".join(log))}
    sent = sum(int(line) for line in (folder / "counters").read_text().split())
    lines = (folder / "run" / "losses.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    steady = [speeds[step] for step in speeds if step > WARM_UP]
    return {
        "mbit": mbit,
        "recipe": recipe,
        "tokens_per_second": max(steady),
        "median": statistics.median(steady),
        "predicted": predict(folder, task, recipe, mbit, times) if mbit else None,
        "bytes_per_token": sent / (steps * task.tokens),
        "loss": statistics.mean(losses[-MEAN:]),
        "losses": losses,
        "seconds": [task.tokens / speed for speed in speeds.values()],
    }


def draw(rows: Sequence[dict[str, Any]], image: Path) -> None:
    """Draw the losses, running means, over the seconds since the first step, a panel for each link."""
    links = list(dict.fromkeys(row["mbit"] for row in rows))
    figure = Figure(figsize=(4.5 * len(links), 3.5), layout="constrained")
    for axes, mbit in zip(figure.subplots(1, len(links), squeeze=False)[0], links, strict=True):
        for row in (row for row in rows if row["mbit"] == mbit):
            losses, seconds = row["losses"], [*accumulate(row["seconds"])]
            means = [statistics.mean(losses[max(0, i - MEAN + 1) : i + 1]) for i in range(len(losses))]
            axes.plot(seconds, means, label="DeepSpeed alone" if row["recipe"] == BASELINE else row["recipe"])
        axes.set(title=f"{mbit:g} Mbit/s", xlabel="seconds of training", ylabel="loss, nats a token")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


def links_slower_by(factors: Sequence[float], task: Task, free: float) -> list[float]:
    """Return the Mbit/s at which a step of DeepSpeed alone takes about so many times its `free` seconds."""
    return [float(f"{task.megabits / (factor - 1) / free:.2g}") for factor in factors]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    links = parser.add_mutually_exclusive_group()
    links.add_argument(
        "--rates", nargs="+", type=float, default=[100, 1000], help="of the link, Mbit/s (default: 100 1000)"
    )
    links.add_argument(
        "--slower",
        nargs="+",
        type=float,
        metavar="TIMES",
        help="instead, links on which DeepSpeed alone takes about so many times its step without limits",
    )
    parser.add_argument(
        "--recipes", nargs="+", default=["balanced", "safe", "auto"], help="default: balanced safe auto"
    )
    parser.add_argument("--model", type=Path, help="folder with a Transformers checkpoint and tokenizer")
    parser.add_argument("--text", type=Path, help="file to train it on")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--steps", type=int, default=24, help="of each run, 6 to 25 (default: 24)")
    parser.add_argument("--picture", type=Path, help="file for the losses over time")
    parser.add_argument(
        "--out", type=Path, default=LAUNCH.parent / "runs" / "bench-finetune", help="default: %(default)s"
    )
    args = parser.parse_args()
    if not 6 <= args.steps <= MOST_STEPS:
        parser.error(f"--steps: {args.steps} is not allowed: should be 6 to {MOST_STEPS}")
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text go together")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run() cleans up
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.model:
        lr = 1e-4 if args.full else 5e-4
        task = Task(args.model.resolve(), args.text.resolve(), 256, 4, not args.full, lr)
    else:
        task = Task(out / "model", out / "text.txt", THIN, 16, not args.full, 1e-3)
        save_model(task.model)
        task.text.write_text(generate_text(100_000))
    rows: list[dict[str, Any]] = []
    times = profile(out, task, args.steps)
    free = train(out, task, BASELINE, None, args.steps, times)["median"]
    print(f"stage times: {' '.join(times)}; tokens/s of DeepSpeed alone on an unlimited link: {free:.0f}\n")
    print(
        "| Mbit/s | recipe | median | best | predicted | / DeepSpeed | / free | bytes a token | loss | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for mbit in links_slower_by(args.slower, task, task.tokens / free) if args.slower else args.rates:
        stock = 0.0
        for recipe in (BASELINE, *args.recipes):
            row = train(out, task, recipe, mbit, args.steps, times)
            stock = stock or row["median"]
            row["over_stock"], row["of_free"] = row["median"] / stock, row["median"] / free
            row["load"] = os.getloadavg()[0]
            rows.append(row)
            cells = f"{mbit:g} | {recipe} | {row['median']:.0f} | {row['tokens_per_second']} | "
            cells += f"{row['predicted'] or 0:.0f} | {row['over_stock']:.2f} | {row['of_free']:.2f}"
            print(
                f"| {cells} | {row['bytes_per_token']:.0f} | {row['loss']:.3f} | {row['load']:.1f} |",
                flush=True,
            )
            (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
