"""Train a small language model once per recipe through the deepspeed launcher, and compare: `make demo`.

    python launch/demo.py [--recipes none safe balanced] [--steps 120] [--out runs/demo]

Each recipe is a file of ds_configs/; only DeepSpeed's CSV monitor is added to it. Everything reported is read
back from the CSV files: OUT/summary.json holds one row per recipe,

    first_loss, final_loss   mean training loss of the first and of the last 5 steps
    raw_bytes, wire_bytes    what the stages sent in the whole run, before and after compression
    ratio                    raw_bytes / wire_bytes
    step_ms                  median time of a training step, the first 5 left out
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from ds_compress.cli.console import show
from ds_compress.cli.runs import LOSS, RecordedRun, read_runs, read_series
from ds_compress.errors import CompressionError
from ds_compress.monitor.progress import Progress
from launch.ports import reserved_port

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 5  # steps
STAGES = 2
POLL_S = 0.5


def derive_config(recipe: dict, steps: int, folder: Path) -> dict:
    """The recipe with CSV files in `folder`/csv and byte counts written at an interval that meets the last
    step."""
    monitor = {**recipe["ds_compress"].get("monitor", {}), "every": math.gcd(steps, 10)}
    return {
        **recipe,
        "ds_compress": {**recipe["ds_compress"], "monitor": monitor},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
    }


@contextmanager
def deepspeed_launcher(ranks: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Return the command that runs a script on `ranks` ranks of this machine, and its environment.

    The port they meet on is theirs until the end of the context.
    """
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if torch.cuda.device_count() < ranks:
        env.setdefault("DS_ACCELERATOR", "cpu")
    program = str(Path(sys.executable).with_name("deepspeed"))
    with reserved_port() as port:
        yield [program, "--num_gpus", str(ranks), "--master_port", str(port)], env


def launch(config: Path, steps: int, folder: Path) -> None:
    """Train through the deepspeed launcher: its output goes to `folder`/train.log, progress and what matters
    to the screen.

    Raises:
        SystemExit: the launcher failed.
    """
    log = folder / "train.log"
    with open(log, "w") as output, deepspeed_launcher(STAGES) as (launcher, env):
        command = [
            *launcher,
            str(ROOT / "launch" / "train_lm.py"),
            "--stages",
            str(STAGES),
            "--steps",
            str(steps),
            "--deepspeed_config",
            str(config),
        ]
        env["TQDM_DISABLE"] = "1"  # what is shown here says more
        with subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT) as process:
            progress = Progress(folder.name, steps)
            follow(process, log, folder / "csv", progress)
            progress.close()
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-40:])
        sys.exit(f"{tail}\ndemo: {shlex.join(command)} exited with {process.returncode}; all output: {log}")


def follow(process: subprocess.Popen, log: Path, folder: Path, progress: Progress) -> None:
    """Show progress from the CSV files in `folder`, and warnings of `log`, until `process` ends."""
    with open(log) as lines:
        ended = False
        while not ended:
            ended = process.poll() is not None
            for line in lines:
                if line.startswith(("ds_compress", "trained")):
                    progress.say(line.rstrip())
            progress.update(*read_progress(folder))
            time.sleep(0 if ended else POLL_S)


def read_progress(folder: Path) -> tuple[int, dict[str, str]]:
    """Return the steps done, and their loss, ratio and bytes saved as far as written."""
    try:
        (run,) = read_runs(folder)
    except CompressionError:  # no step is written yet
        return 0, {}
    losses = run.series[LOSS]
    values = {"loss": f"{losses[-1][1]:.3f}"}
    raw, wire = map(run.last_total, ("raw_bytes", "wire_bytes"))
    if wire > 0:
        values |= {
            "ratio": f"{raw / wire:.2f}x",
            "saved": f"{round((raw - wire) / 1e9, 3) + 0.0:.3f} GB",
        }  # no -0.000
    return len(losses), values


def total_bytes(run: RecordedRun, name: str, samples: int) -> int:
    """Return the bytes after `samples` samples, all of `run`; `name`: raw_bytes or wire_bytes.

    Raises:
        SystemExit: there are none, or they end before the run does.
    """
    totals = run.total(name)
    if not totals:
        sys.exit(
            f"demo: {run.name}: no {name}: ds_compress was not active in this run; is it installed in this "
            "environment (pip install -e .)?"
        )
    if totals[-1][0] != samples:
        sys.exit(f"demo: {run.name}: {name} end at sample {totals[-1][0]}, the run at {samples}")
    return int(totals[-1][1])


def summarize(recipe: str, folder: Path) -> dict:
    """Return one row of summary.json, from the CSV files in `folder`."""
    (run,) = read_runs(folder)
    losses, samples = [loss for _, loss in run.series[LOSS]], run.series[LOSS][-1][0]
    times = [ms for _, ms in read_series(folder / "Train_Samples_step_ms.csv")]
    raw, wire = (total_bytes(run, name, samples) for name in ("raw_bytes", "wire_bytes"))
    return {
        "recipe": recipe,
        "steps": len(losses),
        "first_loss": round(statistics.fmean(losses[:WINDOW]), 4),
        "final_loss": round(statistics.fmean(losses[-WINDOW:]), 4),
        "raw_bytes": raw,
        "wire_bytes": wire,
        "ratio": round(raw / wire, 3),
        "step_ms": round(statistics.median(times[WINDOW:] or times), 1),
    }


def print_table(rows: list[dict]) -> None:
    table = [
        {
            "recipe": row["recipe"],
            "steps": str(row["steps"]),
            "first loss": f"{row['first_loss']:.3f}",
            "final loss": f"{row['final_loss']:.3f}",
            "MB raw": f"{row['raw_bytes'] / 1e6:.1f}",
            "MB sent": f"{row['wire_bytes'] / 1e6:.1f}",
            "ratio": f"{row['ratio']:.2f}",
            "ms/step": f"{row['step_ms']:.0f}",
        }
        for row in rows
    ]
    show(f"{STAGES}-stage pipeline, loss in nats per byte", table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["none", "safe", "balanced"],
        metavar="NAME",
        help="names of files in ds_configs/ (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="training steps per recipe (default: %(default)s)"
    )
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
        launch(config, args.steps, folder)
        rows.append(summarize(recipe, folder / "csv"))
    summary = out / "summary.json"
    summary.write_text(json.dumps(rows, indent=2) + "\n")
    print_table(rows)
    print(f"wrote {summary}")


if __name__ == "__main__":
    main()
