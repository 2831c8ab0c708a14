"""Train the same small language model once per recipe through the deepspeed launcher, and compare: `make demo`.

    python launch/demo.py [--recipes none topk10 quant4_8] [--steps 120] [--out runs/demo]

Each recipe is a file of ds_configs/; only DeepSpeed's CSV monitor is added to it. Everything reported is read back
from the CSV files: OUT/summary.json holds one row per recipe,

    first_loss, final_loss   mean training loss of the first and of the last 5 steps
    raw_bytes, wire_bytes    what the stages sent in the whole run, before and after compression, both directions
    ratio                    raw_bytes / wire_bytes
    step_ms                  median time of a training step, the first 5 left out
"""

import argparse
import csv
import json
import math
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 5  # steps
STAGES = 2


def derive_config(recipe: dict, steps: int, folder: Path) -> dict:
    """The recipe with CSV files in `folder`/csv and byte counts written at an interval that meets the last step."""
    monitor = {**recipe["ds_compress"].get("monitor", {}), "every": math.gcd(steps, 10)}
    return {
        **recipe,
        "ds_compress": {**recipe["ds_compress"], "monitor": monitor},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
    }


def launch(config: Path, steps: int, log: Path) -> None:
    """Train through the deepspeed launcher: its output goes to `log`, progress and what matters to the screen.

    Raises:
        SystemExit: the launcher failed.
    """
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if torch.cuda.device_count() < STAGES:
        env.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(STAGES), "--master_port", str(port),
        str(ROOT / "launch" / "train_lm.py"), "--stages", str(STAGES), "--steps", str(steps),
        "--deepspeed_config", str(config),
    ]
    tail: list[str] = []
    # DeepSpeed logs to stdout; tqdm and tracebacks go to stderr, which stays the terminal
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process, open(log, "w", 1) as copy:
        for line in process.stdout:
            copy.write(line)
            tail = [*tail[-19:], line]
            if line.startswith(("ds_compress", "trained")):
                print(f"\r{line}", end="", flush=True)  # over the progress bar, which is redrawn below
    if process.returncode:
        sys.exit(f"{''.join(tail)}demo: {shlex.join(command)} exited with {process.returncode}; all output: {log}")


def read_series(file: Path) -> list[tuple[int, float]]:
    """(samples seen, value) per row of a file of DeepSpeed's CSV monitor, which names it after its label."""
    with open(file, newline="") as lines:
        return [(int(samples), float(value)) for samples, value in csv.reader(lines) if samples != "step"]


def total_bytes(folder: Path, kind: str, samples: int) -> int:
    """Sum over boundaries and directions of the running totals of `kind` ("raw" or "wire") after `samples` samples.

    Raises:
        SystemExit: no totals, or they end before the run does.
    """
    files = sorted(folder.glob(f"Train_Compression_boundary_*_{kind}_bytes.csv"))
    if not files:
        sys.exit(f"demo: no Train_Compression_*_{kind}_bytes.csv in {folder}: ds_compress was not active in this run; "
                 "is it installed in this environment (pip install -e .)?")
    last = {file: read_series(file)[-1] for file in files}
    for file, (counted, _) in last.items():
        if counted != samples:
            sys.exit(f"demo: {file} ends at sample {counted}, the run at {samples}")
    return int(sum(value for _, value in last.values()))


def summarize(recipe: str, folder: Path) -> dict:
    """One row of summary.json from the CSV files in `folder`."""
    losses = read_series(folder / "Train_Samples_train_loss.csv")
    times = [ms for _, ms in read_series(folder / "Train_Samples_step_ms.csv")]
    samples = losses[-1][0]
    raw, wire = (total_bytes(folder, kind, samples) for kind in ("raw", "wire"))
    return {
        "recipe": recipe,
        "steps": len(losses),
        "first_loss": round(statistics.fmean(loss for _, loss in losses[:WINDOW]), 4),
        "final_loss": round(statistics.fmean(loss for _, loss in losses[-WINDOW:]), 4),
        "raw_bytes": raw,
        "wire_bytes": wire,
        "ratio": round(raw / wire, 3),
        "step_ms": round(statistics.median(times[WINDOW:] or times), 1),
    }


def print_table(rows: list[dict]) -> None:
    table = Table(title=f"{STAGES}-stage pipeline, loss in nats per byte")
    table.add_column("recipe")
    for name in ("steps", "first loss", "final loss", "MB raw", "MB sent", "ratio", "ms/step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["recipe"], str(row["steps"]), f"{row['first_loss']:.3f}", f"{row['final_loss']:.3f}",
                      f"{row['raw_bytes'] / 1e6:.1f}", f"{row['wire_bytes'] / 1e6:.1f}", f"{row['ratio']:.2f}",
                      f"{row['step_ms']:.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["none", "topk10", "quant4_8"], metavar="NAME",
                        help="names of files in ds_configs/ (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="training steps per recipe (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="default: runs/demo")
    args = parser.parse_args()
    known = sorted(file.stem for file in (ROOT / "ds_configs").glob("*.json"))
    for recipe in args.recipes:
        if recipe not in known:
            parser.error(f"--recipes: {recipe!r} is not in ds_configs/; known: {', '.join(known)}")
    out = args.out.resolve()
    rows = []
    for number, recipe in enumerate(args.recipes, 1):
        print(f"[{number}/{len(args.recipes)}] {recipe}", flush=True)
        folder = out / recipe
        shutil.rmtree(folder / "csv", ignore_errors=True)  # the CSV monitor appends to what it finds
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads((ROOT / "ds_configs" / f"{recipe}.json").read_text())
        config = folder / "ds_config.json"
        config.write_text(json.dumps(derive_config(settings, args.steps, folder), indent=2))
        launch(config, args.steps, folder / "train.log")
        rows.append(summarize(recipe, folder / "csv"))
    summary = out / "summary.json"
    summary.write_text(json.dumps(rows, indent=2) + "\n")
    print_table(rows)
    print(f"wrote {summary}")


if __name__ == "__main__":
    main()
