"""Train two replicas of one stage, one on each host, over links of several speeds, for net.py."""

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.cli.console import show
from launch.bench.net_runs import HIDDEN, LAUNCH, SEQ, Wire, read, run

LAYERS = 4
SKIPPED = 2  # steps at the start of a run: buffers are made, connections opened
SMALL_BUCKETS = {"bucket_mb": 2}  # the model has 12.6 MB of gradients
EIGHT_BITS = {"codec": {"name": "quantize", "bits": 8}, "feedback": "ef", **SMALL_BUCKETS}
FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", **SMALL_BUCKETS}
BF16 = {"bf16": {"enabled": True}}


class Setting(NamedTuple):
    """What the ds_config.json has beside batch sizes and optimizer."""

    dtype: dict[str, Any]
    replicas: dict[str, Any] | None = None  # None: DeepSpeed alone


SETTINGS = {
    "fp32 stock": Setting({}),
    "fp32 8 bits": Setting({}, EIGHT_BITS),
    "fp32 4 bits": Setting({}, FOUR_BITS),
    "fp32 4 bits, no overlap": Setting({}, {**FOUR_BITS, "overlap": False}),
    "bf16 stock": Setting(BF16),
    "bf16 4 bits": Setting(BF16, FOUR_BITS),
    "bf16 4 bits, parameters 4 bits": Setting(BF16, {**FOUR_BITS, "parameters": 4}),
}


def bench(out: Path, steps: int, micro_batch: int, slowdowns: Sequence[float]) -> None:
    """Train every setting on the machine's own link, and where DeepSpeed alone takes so many times
    its step in fp32; write OUT/rows.json.

    Its keys: link; setting; step_s, the median over the steps, the first ones left out; step_over_free, over
    that of DeepSpeed alone in the same dtype on the machine's own link; wire_bytes a step, of both
    directions, TCP and IP headers included, without the broadcasts before the first step; fewer_bytes, how
    many times fewer than DeepSpeed alone in the same dtype; first_loss; last_loss.
    """
    rows: list[dict[str, Any]] = []
    starts = dict[str, float]()  # bytes before the first step, by setting of DeepSpeed alone: its broadcasts
    for slowdown in (None, *slowdowns):
        wire = Wire()
        if slowdown is not None:  # nothing hides the exchange, so its time is added to the step
            bits = 8 * rows[0]["wire_bytes"] / 2
            wire = Wire(float(f"{bits / ((slowdown - 1) * rows[0]['step_s']) / 1e6:.3g}"))
        for name, setting in SETTINGS.items():
            stock = f"{name.split()[0]} stock"
            run_of_setting = _train(out, name, setting, wire, steps, micro_batch)
            if name not in starts and name == stock:
                one_step = _train(out, f"{name} 1 step", setting, wire, 1, micro_batch)["bytes"]
                starts[stock] = one_step - (run_of_setting["bytes"] - one_step) / (steps - 1)
            row = {"link": wire.name, "setting": name, **run_of_setting}
            row["wire_bytes"] = round((row.pop("bytes") - starts[stock]) / steps)
            rows.append(row)
            free = next(each for each in rows if each["setting"] == stock)
            row["step_over_free"] = row["step_s"] / free["step_s"]
            row["fewer_bytes"] = free["wire_bytes"] / row["wire_bytes"]
            (out / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")
    table = [
        {
            "link": row["link"],
            "setting": row["setting"],
            "step, s": f"{row['step_s']:.3f}",
            "/ free": f"{row['step_over_free']:.2f}",
            "MB a step": f"{row['wire_bytes'] / 1e6:.2f}",
            "fewer bytes": f"{row['fewer_bytes']:.2f}x",
            "loss": f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}",
        }
        for row in rows
    ]
    show("2 replicas of one stage", table)


def _train(
    out: Path, name: str, setting: Setting, wire: Wire, steps: int, micro_batch: int
) -> dict[str, float]:
    """Return step time, bytes and losses of one run."""
    folder = out / f"{name} {wire.name}".replace(" ", "-").replace(",", "").replace("/s", "").lower()
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
        config["ds_compress"] = {"replicas": setting.replicas, "monitor": {"every": 0}}
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
