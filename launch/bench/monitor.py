"""Measure what monitoring costs: steps with and without the monitor alternate in one run of a 2-stage
pipeline.

    deepspeed --num_gpus 2 launch/bench/monitor.py [--rounds 40] [--hidden 256] [--seq 128] [--json FILE]

Every round does one step of each kind, in random order: monitor off; measured and gathered but written
nowhere; written to CSV, to TensorBoard, to W&B (offline). The overhead is the median over the rounds of a
step's time over that of the step without monitor of the same round, so a machine that gets slower or faster
does not count; beside it the same for the processor time of rank 0, which does the writing: that holds on a
busy machine too. A monitor with "every": N costs an Nth of that.
"""

import argparse
import atexit
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_lm import batches, build_layers, load_text, loss_fn

WARM_UP = 3  # rounds
BLOCK = {
    "forward": {"codec": {"name": "quantize", "bits": 4}},
    "backward": {"codec": {"name": "quantize", "bits": 8}},
    "min_numel": 0,
    "monitor": {"every": 1},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def ds_config(folder: str) -> dict:
    at = {"enabled": True, "output_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000000,
        "csv_monitor": {**at, "job_name": "csv"},
        "tensorboard": {**at, "job_name": "tensorboard"},
        "wandb": {"enabled": True, "project": "bench_monitor"},
        "ds_compress": BLOCK,
    }


def main() -> None:
    args = parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    folder = tempfile.mkdtemp(prefix="bench_monitor_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=folder)
    model = PipelineModule(
        layers=build_layers(args),
        num_stages=2,
        loss_fn=loss_fn,
        partition_method="type:Block",
        base_seed=1,
    )
    engine, *_ = deepspeed.initialize(
        config=ds_config(folder), model=model, model_parameters=model.parameters()
    )
    rows = measure(engine, batches(load_text(None)[0], 8, args.seq, 1), args.rounds)
    if engine.global_rank == 0:
        title = f"2 stages, messages {[8, args.seq, args.hidden]} fp32, {torch.get_num_threads()} thread(s)"
        table = Table("step", "ms", "overhead", "CPU ms", "overhead", title=title)
        for row in rows:
            table.add_row(
                row["kind"],
                f"{row['step_ms']:.1f}",
                f"{row['overhead']:+.2%}",
                f"{row['cpu_ms']:.1f}",
                f"{row['cpu_overhead']:+.2%}",
            )
        Console().print(table)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measure(engine, data, rounds: int) -> list[dict]:
    """Rows of {kind, step_ms, overhead, cpu_ms, cpu_overhead} by the clocks of rank 0, which sees every
    loss."""
    master = engine.monitor
    sinks = {"CSV": master.csv_monitor, "TensorBoard": master.tb_monitor, "W&B": master.wandb_monitor}
    kinds = ["off", "measured", *sinks]
    order, times = random.Random(0), {kind: [] for kind in kinds}
    for _ in range(WARM_UP + rounds):
        for kind in order.sample(kinds, len(kinds)):
            # without DeepSpeed's own events, which would cost the same in every kind of step and hide ours
            write = sinks[kind].write_events if sinks.get(kind) else lambda events: None
            engine.monitor = SimpleNamespace(enabled=True, write_events=write, tb_monitor=None)
            engine.ds_compress.monitor._off = kind == "off"
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            engine.train_batch(data).item()
            times[kind].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    rows = []
    for kind in kinds:
        row = {"kind": kind}
        for clock, prefix in enumerate(("", "cpu_")):
            seconds, off = ([pair[clock] for pair in times[name][WARM_UP:]] for name in (kind, "off"))
            row[f"{prefix or 'step_'}ms"] = 1e3 * statistics.median(seconds)
            row[f"{prefix}overhead"] = (
                statistics.median(mine / other for mine, other in zip(seconds, off)) - 1
            )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
