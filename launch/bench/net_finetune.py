"""Measure LoRA fine-tuning over a slow link between two hosts, uncompressed and with recipes. Needs root.

    python launch/bench/net_finetune.py [--rates 100 1000] [--recipes balanced safe auto] [--steps 24]
                                        [--out FOLDER]

The hosts are two network namespaces (two_hosts.sh) with one core and one stage each, which run `deepspeed
--module ds_compress.hf.finetune`. The model is an fp32 Llama with random weights, two layers and hidden size
512: so thin that a core computes as many tokens a second as a link of 100 Mbit/s carries uncompressed.
Sequences have 512 tokens, and a step has 16 micro-batches of one. OUT/rows.json and a table on standard
output have, for each link and recipe,

    tokens_per_second    of the fastest step after the first ones; other programs slow some steps down
    median               of the tokens per second of these steps
    predicted            what `ds-compress advise --finetune` says, from the compute times of DeepSpeed alone
                         on an unlimited link; null with "auto"
    over_stock           tokens_per_second over that of DeepSpeed alone on this link
    bytes_per_token      of all steps and two evaluations of a sequence, both directions, with TCP and IP
                         headers; with "auto" they include its first steps, which are uncompressed
    loss                 of the last step
    load                 mean number of processes that wanted a core during the last minute of the run
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
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.net_runs import BASELINE, LAUNCH, PAYLOAD, STAGE_TIMES, WARM_UP, Wire, run, stage_times

LENGTH, MICRO_BATCHES = 512, 16
WORDS = 1000
MOST_STEPS = 25  # up to here the log has a line for each
SPEED = re.compile(r"training: (\d+)/\d+ steps,[^\n]*? tokens/s=(\d+)")


def save_model(folder: Path) -> None:
    """Create a checkpoint and a tokenizer that knows the words of `generate_text`."""
    known = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=known, unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=1024,
        max_position_embeddings=LENGTH,
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


def make_settings(out: Path, folder: Path, recipe: str, steps: int) -> dict[str, Any]:
    """Return train.json of a run in `folder`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if recipe != BASELINE:
        config["ds_compress"] = {"recipe": recipe}
    return {
        "model": str(out / "model"),
        "out": str(folder / "run"),
        "data": {"train": str(out / "text.txt"), "documents": "file", "packing": "joined"},
        "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        "sequence_length": LENGTH,
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


def profile(out: Path, steps: int) -> list[str]:
    """Measure the compute times of the stages, and return them as options of `ds-compress advise`."""
    folder = out / "profile"
    log = launch(folder, Wire(), make_settings(out, folder, BASELINE, steps), [STAGE_TIMES])
    stages = stage_times(log)
    # The step of the other stage waits for this one's last backward pass
    options = ["--step-ms", str(min(stage["step_ms"] for stage in stages))]
    for direction in ("forward", "backward"):
        times = ",".join(str(stage[f"{direction}_ms"]) for stage in stages)
        options += [f"--{direction}-ms", times]
    return options


def predict(folder: Path, recipe: str, mbit: float, times: Sequence[str]) -> float | None:
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
    return MICRO_BATCHES * LENGTH / float(row["step_s"])


def train(out: Path, recipe: str, mbit: float, steps: int, times: Sequence[str]) -> dict[str, Any]:
    """Run one training and return its row; the log stays in `out`."""
    folder = out / f"{recipe}-{mbit:g}mbit"
    log = launch(folder, Wire(mbit), make_settings(out, folder, recipe, steps))
    speeds = {int(step): int(speed) for step, speed in SPEED.findall("\n".join(log))}
    sent = sum(int(line) for line in (folder / "counters").read_text().split())
    last = json.loads((folder / "run" / "losses.jsonl").read_text().splitlines()[-1])
    steady = [speeds[step] for step in speeds if step > WARM_UP]
    return {
        "mbit": mbit,
        "recipe": recipe,
        "tokens_per_second": max(steady),
        "median": statistics.median(steady),
        "predicted": predict(folder, recipe, mbit, times),
        "bytes_per_token": sent / (steps * MICRO_BATCHES * LENGTH),
        "loss": last["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[100, 1000], help="of the link, Mbit/s (default: 100 1000)"
    )
    parser.add_argument(
        "--recipes", nargs="+", default=["balanced", "safe", "auto"], help="default: balanced safe auto"
    )
    parser.add_argument("--steps", type=int, default=24, help="of each run, 6 to 25 (default: 24)")
    parser.add_argument(
        "--out", type=Path, default=LAUNCH.parent / "runs" / "bench-finetune", help="default: %(default)s"
    )
    args = parser.parse_args()
    if not 6 <= args.steps <= MOST_STEPS:
        parser.error(f"--steps: {args.steps} is not allowed: should be 6 to {MOST_STEPS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run() cleans up
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model")
    (out / "text.txt").write_text(generate_text(100_000))
    rows: list[dict[str, Any]] = []
    times = profile(out, args.steps)
    print(f"stage times: {' '.join(times)}\n")
    print("| Mbit/s | recipe | tokens/s | median | predicted | / DeepSpeed | bytes a token | loss | load |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for mbit in args.rates:
        stock = 0.0
        for recipe in (BASELINE, *args.recipes):
            row = train(out, recipe, mbit, args.steps, times)
            stock = stock or row["tokens_per_second"]
            row["over_stock"] = row["tokens_per_second"] / stock
            row["load"] = os.getloadavg()[0]
            rows.append(row)
            cells = f"{mbit:g} | {recipe} | {row['tokens_per_second']} | {row['median']:.0f} | "
            cells += f"{row['predicted'] or 0:.0f} | {row['over_stock']:.2f} | {row['bytes_per_token']:.0f}"
            print(f"| {cells} | {row['loss']:.3f} | {row['load']:.1f} |", flush=True)
            (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
