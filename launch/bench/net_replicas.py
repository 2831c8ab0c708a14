"""Train two replicas of one stage, one on each host, over links of several speeds, for net.py."""

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.cli.console import show
from launch.bench.net_runs import HIDDEN, LAUNCH, SEQ, Wire, read, run
from launch.reproduce.run import processor

LAYERS = 4
SKIPPED = 2  # steps at the start of a run: buffers are made, connections opened
SMALL_BUCKETS = {"bucket_mb": 2}  # the model has 12.6 MB of gradients
EIGHT_BITS = {"codec": {"name": "quantize", "bits": 8}, "feedback": "ef", **SMALL_BUCKETS}
FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", **SMALL_BUCKETS}
HALF = {**FOUR_BITS, "bucket_mb": 1}  # as bf16 halves the bytes
FOUR_FOUR_BITS = {**HALF, "parameters": 4}
RANK_8 = {"codec": {"name": "lowrank", "rank": 8}, "feedback": "ef", **SMALL_BUCKETS}
BF16 = {"bf16": {"enabled": True}}


class Setting(NamedTuple):
    """What the ds_config.json has beside batch sizes and optimizer."""

    dtype: dict[str, Any]
    replicas: dict[str, Any] | None = None  # None: DeepSpeed alone
    link: dict[str, Any] = {}


SETTINGS = {
    "fp32 stock": Setting({}),
    "fp32 8 bits": Setting({}, EIGHT_BITS),
    "fp32 4 bits": Setting({}, FOUR_BITS),
    "fp32 4 bits, no overlap": Setting({}, {**FOUR_BITS, "overlap": False}),
    "fp32 rank 8": Setting({}, RANK_8),
    "bf16 stock": Setting(BF16),
    "bf16 4 bits": Setting(BF16, HALF),
    "bf16 4 bits, parameters 4 bits": Setting(BF16, FOUR_FOUR_BITS),
    "bf16 4 bits, parameters 4 bits, no overlap": Setting(BF16, {**FOUR_FOUR_BITS, "overlap": False}),
}
DTYPES = tuple(dict.fromkeys(name.split()[0] for name in SETTINGS))
NEAR = 0.03
"""Largest relative difference of the step of DeepSpeed alone from the one that a link is meant to give."""


def bench(out: Path, steps: int, micro_batch: int, slowdowns: Sequence[float], dtypes: Sequence[str]) -> None:
    """Train the settings of each dtype on the machine's own link, and where DeepSpeed alone takes so many
    times its step in this dtype; write OUT/rows.json, and go on from the rows that it has.

    Its keys: dtype; slowdown, null on the machine's own link; mbit, of the link; setting; step_s, the median
    over the steps, the first ones left out; step_over_free, over that of DeepSpeed alone in the same dtype on
    the machine's own link; wire_bytes a step, of both directions, TCP and IP headers included, without the
    broadcasts before the first step; fewer_bytes, how many times fewer than DeepSpeed alone in the same dtype
    on the same link; start_bytes, of these broadcasts; first_loss; last_loss; processor.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def find(name: str, slowdown: float | None) -> dict[str, Any] | None:
        return next((r for r in rows if (r["setting"], r["slowdown"]) == (name, slowdown)), None)

    def add(name: str, slowdown: float | None, wire: Wire, found: dict[str, Any]) -> None:
        stock = f"{name.split()[0]} stock"
        free, same = find(stock, None) or found, find(stock, slowdown)
        found["start_bytes"] = free["start_bytes"]
        nbytes = (found.pop("bytes") - found["start_bytes"]) / steps
        rows.append(
            {
                "dtype": name.split()[0],
                "slowdown": slowdown,
                "mbit": wire.mbit,
                "setting": name,
                **found,
                "step_over_free": found["step_s"] / free["step_s"],
                "wire_bytes": round(nbytes),
                "fewer_bytes": same["wire_bytes"] / nbytes if same else 1.0,
                "processor": processor(),
            }
        )
        path.write_text(json.dumps(rows, indent=2) + "\n")

    def train(name: str, wire: Wire) -> dict[str, Any]:
        return _train(out, name, SETTINGS[name], wire, steps, micro_batch)

    for dtype in dtypes:
        stock = f"{dtype} stock"
        for slowdown in (None, *slowdowns):
            known, free = find(stock, slowdown), find(stock, None)
            if known is not None:
                wire = Wire(known["mbit"])
            elif free is None:
                wire = Wire()
                found = train(stock, wire)
                one_step = _train(out, f"{stock} 1 step", SETTINGS[stock], wire, 1, micro_batch)["bytes"]
                found["start_bytes"] = one_step - (found["bytes"] - one_step) / (steps - 1)
                add(stock, slowdown, wire, found)
            else:
                assert slowdown is not None  # of which there is no row
                wire, found = _slow_link(partial(train, stock), slowdown, free)
                add(stock, slowdown, wire, found)
            for name in SETTINGS:
                if name.split()[0] == dtype and find(name, slowdown) is None:
                    add(name, slowdown, wire, train(name, wire))
    table = [
        {
            "link": Wire(row["mbit"]).name,
            "setting": row["setting"],
            "step, s": f"{row['step_s']:.3f}",
            "step / baseline step, unlimited link": f"{row['step_over_free']:.2f}",
            "MB a step": f"{row['wire_bytes'] / 1e6:.2f}",
            "fewer bytes": f"{row['fewer_bytes']:.2f}x",
            "loss": f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}",
        }
        for row in rows
    ]
    show("2 replicas of one stage", table)


def bench_connections(
    out: Path, steps: int, micro_batch: int, wires: Sequence[Wire], numbers: Sequence[int | str]
) -> None:
    """Train in fp32 over each of the links, with DeepSpeed alone and with 4 and 8 bits over so many
    connections; write OUT/rows.json and a table."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for wire in wires:
        settings = {"DeepSpeed alone": SETTINGS["fp32 stock"]}
        for name, number in product(("8 bits", "4 bits"), numbers):
            replicas = SETTINGS[f"fp32 {name}"].replicas
            settings[f"{name}, connections {number}"] = Setting({}, replicas, {"connections": number})
        for name, setting in settings.items():
            found = _train(out, name, setting, wire, steps, micro_batch)
            rows.append({"setting": name, **asdict(wire), **found, "processor": processor()})
            (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")
    table = [
        {
            "link": f"{row['mbit']:g} Mbit/s, {row['rtt_ms']:g} ms",
            "lost, %": f"{row['loss']:g}",
            "setting": row["setting"],
            "step, s": f"{row['step_s']:.3f}",
            "loss": f"{row['first_loss']:.4f} -> {row['last_loss']:.4f}",
        }
        for row in rows
    ]
    show("2 replicas of one stage", table)


def _slow_link(
    train: Callable[[Wire], dict[str, Any]], slowdown: float, free: dict[str, Any]
) -> tuple[Wire, dict[str, Any]]:
    """Find the link on which DeepSpeed alone takes `slowdown` times its step on a free one; return its run
    there too.

    Nothing hides the exchange, so its time is added to the step.
    """
    added = (slowdown - 1) * free["step_s"]
    mbit = 8 * free["wire_bytes"] / 2 / added / 1e6
    for _ in range(3):
        wire = Wire(float(f"{mbit:.3g}"))
        found = train(wire)
        if abs(found["step_s"] / (slowdown * free["step_s"]) - 1) < NEAR:
            break
        mbit *= (found["step_s"] - free["step_s"]) / added
    return wire, found


def _train(
    out: Path, name: str, setting: Setting, wire: Wire, steps: int, micro_batch: int
) -> dict[str, float]:
    """Return step time, bytes and losses of one run."""
    place = f"{name} {wire.name} {wire.rtt_ms:g} ms {wire.loss:g}"
    folder = out / place.replace(" ", "-").replace(",", "").replace("/s", "").lower()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000000,
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        **setting.dtype,
    }
    if setting.replicas is not None:
        config["ds_compress"] = {"replicas": setting.replicas, "link": setting.link, "monitor": {"every": 0}}
    (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
    words = [LAUNCH / "two_hosts.sh", LAUNCH / "train_lm.py", "--stages", 1, "--layers", LAYERS]
    words += ["--hidden", HIDDEN, "--seq", SEQ, "--steps", steps]
    words += ["--deepspeed_config", folder / "ds_config.json"]
    log, succeeded = run(list(map(str, words)), folder, wire, 1)
    if not succeeded:
        sys.exit("\n".join([*log[-20:], f"bench_net: {name} failed; all output: {folder / 'log'}"]))
    seconds = [ms / 1e3 for ms in read(folder / "csv" / "Train_Samples_step_ms.csv")]
    losses = read(folder / "csv" / "Train_Samples_train_loss.csv")
    return {
        "step_s": statistics.median(seconds[SKIPPED:] or seconds),
        "bytes": sum(map(int, (folder / "counters").read_text().split())),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
