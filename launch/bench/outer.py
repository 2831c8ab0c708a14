"""Losses and bytes of replicas that exchange their progress every 30 steps, against an all-reduce each step.

    python launch/bench/outer.py [--seeds 0 1 2] [--results results/outer.jsonl]

Two replicas of a byte-level GPT train in one process: from random weights, and fine-tuned from weights that
were trained on the other half of the text. The text is the source of Python's standard library, or --data. A
row a run is appended to the results; runs that are there are skipped. `--table` prints the means.
"""

import argparse
import copy
import functools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.simulate import SimulatedReplicas, SimulatedRounds
from launch.train_lm import batches, build_layers, load_text, loss_fn

REPLICAS, EVERY = 2, 30
MODEL = argparse.Namespace(layers=2, hidden=128, heads=4, seq=64)
MICRO_BATCH, STEPS, LR = 4, 600, 2e-3
EVALUATED = 64  # held-out micro-batches
VALUES = {"name": "quantize", "bits": 3, "group_size": 64}
TOPK = {"name": "topk", "density": 0.016, "indices": "rice", "values": VALUES}
QUANTIZE = {"name": "quantize", "bits": 4}
SGD = {"lr": 1.0, "momentum": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "all-reduce each step": {},
    "none": {"codec": "none"},
    "none, delayed": {"codec": "none", "outer": {"delayed": True}},
    "4 bits, delayed": {"codec": QUANTIZE, "feedback": "ef", "outer": {"delayed": True}},
    "4 bits, plain outer step, delayed": {
        "codec": QUANTIZE,
        "feedback": "ef",
        "outer": {"delayed": True, **SGD},
    },
    "4 bits, plain outer step": {"codec": QUANTIZE, "feedback": "ef", "outer": SGD},
    "topk, delayed": {"codec": TOPK, "feedback": "ef", "outer": {"delayed": True}},
    "topk, plain outer step, delayed": {"codec": TOPK, "feedback": "ef", "outer": {"delayed": True, **SGD}},
    "topk, plain outer step": {"codec": TOPK, "feedback": "ef", "outer": SGD},
}
KINDS = ("from scratch", "fine-tuned")


def block_of(setting: str) -> dict[str, Any]:
    """The "ds_compress" block of a setting."""
    options = SETTINGS[setting]
    if not options:
        return {}
    outer = {"delayed": False, **options.get("outer", {})}
    return {"replicas": {**options, "every": EVERY, "outer": outer}}


def new_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(spec.build() for spec in build_layers(MODEL)))


def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """The mean loss of the same micro-batches of held-out text, in nats per byte."""
    data = batches(text, MICRO_BATCH, MODEL.seq, seed=99)
    with torch.no_grad():
        return statistics.fmean(loss_fn(model(x), y).item() for (x, y), _ in zip(data, range(EVALUATED)))


def train(model: nn.Module, text: Tensor, seed: int, setting: str, steps: int) -> tuple[nn.Module, Any]:
    """Train `model` as two replicas; return the mean of their weights, and the bytes that one sent."""
    config = {"ds_compress": block_of(setting)}
    models = [model] if not SETTINGS[setting] else [copy.deepcopy(model) for _ in range(REPLICAS)]
    exact = SimulatedReplicas(model, config, REPLICAS) if len(models) == 1 else None
    rounds = None if exact else SimulatedRounds(models, config)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LR) for each in models]
    data = [batches(text, MICRO_BATCH, MODEL.seq, seed, replica) for replica in range(REPLICAS)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        for replica, own in enumerate(data):
            x, y = next(own)
            loss_fn(models[replica % len(models)](x), y).backward()
            if exact:
                exact.collect()
        if exact:
            exact.average()
        for each, optimizer in zip(models, optimizers):
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if rounds:
            rounds.end_step()
    with torch.no_grad():
        for parameter, *others in zip(*(each.parameters() for each in models)):
            parameter.copy_(torch.stack([parameter, *others]).mean(0))
    return models[0], rounds.sent if rounds else None


@functools.lru_cache
def pretrained(seed: int, data: str | None) -> nn.Module:
    text, _ = load_text(data)
    return train(new_model(seed), text[: len(text) // 2], seed, "all-reduce each step", STEPS)[0]


def run(kind: str, setting: str, seed: int, data: str | None) -> dict[str, Any]:
    """Train and evaluate; return a row."""
    text, held_out = load_text(data)
    model = new_model(seed)
    if kind == "fine-tuned":
        model, text = copy.deepcopy(pretrained(seed, data)), text[len(text) // 2 :]
    started = time.perf_counter()
    model, sent = train(model, text, seed + 1000, setting, STEPS)
    parameters = sum(p.numel() for p in model.parameters())
    raw = 4 * parameters * STEPS * 2 * (REPLICAS - 1) // REPLICAS  # of an fp32 all-reduce each step
    return {
        "task": f"gpt, {kind}",
        "setting": setting,
        "seed": seed,
        "steps": STEPS,
        "every": EVERY if sent else 1,
        "replicas": REPLICAS,
        "parameters": parameters,
        "block": block_of(setting),
        "raw_bytes": raw,
        "wire_bytes": sent.wire_bytes if sent else raw,
        "loss": held_out_loss(model, held_out),
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Print mean losses against those of the same seeds with an all-reduce."""
    exact = {(row["task"], row["seed"]): row["loss"] for row in rows if row["every"] == 1}
    columns = ("task", "setting", "seeds", "loss", "against all-reduce", "times fewer bytes")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for task, setting in dict.fromkeys((row["task"], row["setting"]) for row in rows):
        own = [row for row in rows if (row["task"], row["setting"]) == (task, setting)]
        loss = statistics.fmean(row["loss"] for row in own)
        change = statistics.fmean(row["loss"] / exact.get((task, row["seed"]), math.nan) - 1 for row in own)
        fewer = own[0]["raw_bytes"] / own[0]["wire_bytes"]
        print(f"| {task} | {setting} | {len(own)} | {loss:.4f} | {change:+.2%} | {fewer:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--results", type=Path, default=Path("results/outer.jsonl"))
    parser.add_argument("--data", help="text file or folder (default: Python's standard library)")
    parser.add_argument("--table", action="store_true", help="print the means instead of training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )
    known = {(row["task"], row["setting"], row["seed"]) for row in rows}
    for seed in args.seeds if not args.table else ():
        for kind in args.kinds:
            for setting in args.settings:
                if (f"gpt, {kind}", setting, seed) in known:
                    continue
                row = run(kind, setting, seed, args.data)
                print(json.dumps({key: row[key] for key in ("task", "setting", "seed", "loss", "seconds")}))
                rows.append(row)
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
