"""Losses and bytes of replicas that exchange their progress every 30 steps, against an all-reduce each step.

    python launch/bench/outer.py [--seeds 0 1 2] [--results results/outer.jsonl]

Two replicas of a byte-level model train in one process: from random weights on the first half of a text; and
fine-tuned on the second half, from the weights of the all-reduce. The text is the source of Python's standard
library, or --data. A row a run is appended to the results; runs that are there are skipped. `--table` prints
the means.
"""

import argparse
import copy
import functools
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.simulate import SimulatedReplicas, simulate
from ds_compress.sites.simulation import SimulatedRounds
from launch.reproduce.architectures import llama
from launch.reproduce.presets import LANGUAGE
from launch.train_lm import batches, build_layers, load_text, loss_fn

REPLICAS, EVERY = 2, 30
LAYERS, HIDDEN, HEADS, SEQ = 2, 64, 4, 64
MICRO_BATCH, WARMUP = 8, 50
EVALUATED = 128  # held-out micro-batches
CUTS = [2]  # two stages, each with a block
TOPK = {
    "name": "topk",
    "density": 0.016,
    "indices": "rice",
    "values": {"name": "quantize", "bits": 3, "group_size": 64},
}
SPARSE = {"codec": TOPK, "feedback": "ef", "outer": {"momentum": 0.0}}
FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
NESTEROV = {"lr": 0.7, "momentum": 0.9}
SETTINGS: dict[str, dict[str, Any]] = {
    "all-reduce each step": {},
    "none": {"replicas": {"codec": "none"}},
    "4 bits": {"replicas": FOUR_BITS},
    "topk": {"replicas": SPARSE},
    "4 bits, and between stages": {"replicas": FOUR_BITS, "recipe": "safe"},
    "topk at one, the other none": {"replicas": SPARSE},
    "none, momentum 0": {"replicas": {"codec": "none", "outer": {"momentum": 0.0}}},
    **{f"4 bits, delay {d}": {"replicas": {**FOUR_BITS, "outer": {"delay": d}}} for d in (0, 5, 30)},
    "4 bits, momentum 0.7": {"replicas": {**FOUR_BITS, "outer": {"momentum": 0.7}}},
    "4 bits, momentum 0.7, and between stages": {
        "replicas": {**FOUR_BITS, "outer": {"momentum": 0.7}},
        "recipe": "safe",
    },
    "4 bits, DiLoCo": {"replicas": {**FOUR_BITS, "outer": NESTEROV}},
}
OTHERS = {"topk at one, the other none": "none, momentum 0"}
"""Setting of the other replicas, where that is another one."""
DEFAULT_SETTINGS = list(SETTINGS)[:5]
ARCHITECTURES = ("gpt", "llama")
KINDS = {"from scratch": (2400, 4e-3), "fine-tuned": (1200, 1e-3)}
"""Steps, and the largest learning rate."""
MUON_LR = 0.005
"""The largest learning rate of matrices under Muon. With its default, .02, the Llama ended 1.4 % higher after
2,400 steps of an all-reduce, and 5.9 % higher after rounds."""


def block_of(setting: str) -> dict[str, Any]:
    """The "ds_compress" block of a setting."""
    block = SETTINGS[setting]
    return {**block, "replicas": {**block["replicas"], "every": EVERY}} if block else {}


def new_model(architecture: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if architecture == "llama":
        return nn.Sequential(*llama(replace(LANGUAGE, layers=LAYERS, hidden=HIDDEN, heads=HEADS, seq=SEQ)))
    size = argparse.Namespace(layers=LAYERS, hidden=HIDDEN, heads=HEADS, seq=SEQ)
    return nn.Sequential(*(spec.build() for spec in build_layers(size)))


def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """The mean loss of the same micro-batches of held-out text, in nats per byte."""
    data = batches(text, MICRO_BATCH, SEQ, seed=99)
    with torch.no_grad():
        return statistics.fmean(loss_fn(model(x), y).item() for (x, y), _ in zip(data, range(EVALUATED)))


def share_of_lr(step: int, steps: int) -> float:
    """A warm-up, then half a cosine to 0."""
    return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def new_optimizer(model: nn.Sequential, inner: str, lr: float) -> torch.optim.Optimizer:
    """Return AdamW; or DeepSpeed's Muon for the matrices of the blocks, with its Adam for all else."""
    if inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    matrices = {p for layer in model[1:-1] for p in layer.parameters() if p.ndim == 2}
    others = [p for p in model.parameters() if p not in matrices]
    groups = [
        {"params": [*matrices], "use_muon": True, "lr": MUON_LR},
        {"params": others, "use_muon": False, "lr": lr, "weight_decay": 0.01},
    ]
    return MuonWithAuxAdam(groups)


def train(
    model: nn.Module, text: Tensor, seed: int, setting: str, steps: int, lr: float, inner: str
) -> tuple[list[nn.Module], Any]:
    """Train replicas of `model`, or one model if they all-reduce; return them, and what the first sent."""
    block = block_of(setting)
    config = {"ds_compress": block}
    others = {"ds_compress": block_of(OTHERS.get(setting, setting))}
    models = [copy.deepcopy(model) for _ in range(REPLICAS if block else 1)]
    exact = None if block else SimulatedReplicas(models[0], config, REPLICAS)
    rounds = SimulatedRounds(models, [config, *[others] * (len(models) - 1)]) if block else None
    optimizers = [new_optimizer(each, inner, lr) for each in models]
    rates = [group["lr"] for group in optimizers[0].param_groups]
    if "recipe" in block:
        models = [simulate(each, config, CUTS, replica=number) for number, each in enumerate(models)]
    data = [batches(text, MICRO_BATCH, SEQ, seed, replica) for replica in range(REPLICAS)]
    for step in range(steps):
        for replica, own in enumerate(data):
            x, y = next(own)
            loss_fn(models[replica % len(models)](x), y).backward()
            if exact:
                exact.collect()
        if exact:
            exact.average()
        for each, optimizer in zip(models, optimizers):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share_of_lr(step, steps)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if rounds:
            rounds.end_step()
    return models, rounds.sent if rounds else None


def average(models: list[nn.Module]) -> nn.Module:
    """Give the first model the mean weights of all."""
    with torch.no_grad():
        for parameter, *others in zip(*(each.parameters() for each in models)):
            parameter.copy_(torch.stack([parameter, *others]).mean(0))
    return models[0]


@functools.lru_cache
def pretrained(architecture: str, seed: int, data: str | None, times: int, inner: str) -> nn.Module:
    """Train from random weights with an all-reduce each step."""
    text, _ = load_text(data)
    model = new_model(architecture, seed)
    steps, lr = KINDS["from scratch"]
    exact = "all-reduce each step"
    return train(model, text[: len(text) // 2], seed, exact, times * steps, lr, inner)[0][0]


def run(
    architecture: str, kind: str, setting: str, seed: int, data: str | None, times: int, inner: str
) -> dict[str, Any]:
    """Train and evaluate; return a row."""
    text, held_out = load_text(data)
    (steps, lr), block = KINDS[kind], block_of(setting)
    steps *= times
    is_tuned, half = kind == "fine-tuned", len(text) // 2
    started = time.perf_counter()
    if not is_tuned and not block:
        models, sent = [pretrained(architecture, seed, data, times, inner)], None
    else:
        model = new_model(architecture, seed)
        if is_tuned:
            model = pretrained(architecture, seed, data, times, inner)
        part = text[half:] if is_tuned else text[:half]
        models, sent = train(model, part, seed + 1000 * is_tuned, setting, steps, lr, inner)
    parameters = sum(p.numel() for p in models[0].parameters())
    raw = 4 * parameters * steps * 2 * (REPLICAS - 1) // REPLICAS  # of an fp32 all-reduce each step
    return {
        "task": name_of_task(architecture, kind, inner),
        "setting": setting,
        "seed": seed,
        "text": name_of(data),
        "steps": steps,
        "lr": lr,
        "every": EVERY if sent else 1,
        "replicas": REPLICAS,
        "parameters": parameters,
        "block": block,
        "raw_bytes": raw,
        "wire_bytes": sent.wire_bytes if sent else raw,
        "loss_of_one": held_out_loss(models[0], held_out),
        "loss": held_out_loss(average(models), held_out),
        "seconds": round(time.perf_counter() - started, 1),
    }


def name_of_task(architecture: str, kind: str, inner: str) -> str:
    return f"{architecture}, {kind}" + (", Muon" if inner == "muon" else "")


def name_of(data: str | None) -> str:
    return Path(data).name if data else "python"


def task_of(row: dict[str, Any]) -> str:
    return f"{row['task']}, {row['text']}, {row['steps']} steps"


def table(rows: list[dict[str, Any]]) -> None:
    """Print mean losses against those of the same seeds with an all-reduce."""
    exact = {(task_of(row), row["seed"]): row["loss"] for row in rows if row["every"] == 1}
    columns = ("task", "setting", "seeds", "loss", "against all-reduce", "times fewer bytes")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for task, setting in sorted({(task_of(row), row["setting"]): None for row in rows}):
        own = [row for row in rows if (task_of(row), row["setting"]) == (task, setting)]
        loss = statistics.fmean(row["loss"] for row in own)
        costs = [100 * (row["loss"] / exact.get((task, row["seed"]), math.nan) - 1) for row in own]
        cost = f"{statistics.fmean(costs):+.1f} % ({min(costs):+.1f} to {max(costs):+.1f})"
        fewer = f"{own[0]['raw_bytes'] / own[0]['wire_bytes']:,.0f}"
        is_exact = own[0]["every"] == 1
        cells = (task, setting, len(own), f"{loss:.4f}", "" if is_exact else cost, "" if is_exact else fewer)
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=DEFAULT_SETTINGS, choices=list(SETTINGS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--times", type=int, default=1, help="how many times as many steps")
    parser.add_argument("--architecture", default="gpt", choices=ARCHITECTURES)
    parser.add_argument("--inner", default="adamw", choices=("adamw", "muon"), help="optimizer of a step")
    parser.add_argument("--results", type=Path, default=Path("results/outer.jsonl"))
    parser.add_argument("--data", help="text file or folder (default: Python's standard library)")
    parser.add_argument("--table", action="store_true", help="print the means instead of training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )
    known = {(task_of(row), row["setting"], row["seed"]) for row in rows}
    for seed in args.seeds if not args.table else ():
        for kind in args.kinds:
            for setting in args.settings:
                task = name_of_task(args.architecture, kind, args.inner)
                steps = args.times * KINDS[kind][0]
                if (f"{task}, {name_of(args.data)}, {steps} steps", setting, seed) in known:
                    continue
                row = run(args.architecture, kind, setting, seed, args.data, args.times, args.inner)
                print(json.dumps({key: row[key] for key in ("task", "setting", "seed", "loss", "seconds")}))
                rows.append(row)
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
