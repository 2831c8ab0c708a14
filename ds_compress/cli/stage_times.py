"""Run a DeepSpeed pipeline training script unchanged, and print how long each stage computes.

    deepspeed --num_gpus 2 --module ds_compress stage-times train.py --its --own arguments
    deepspeed --num_gpus 2 --module ds_compress stage-times --module ds_compress.hf.finetune train.json

Each rank prints one line at the end: its stage, and the median ms of the forward pass, the backward pass and
the optimizer step, for `ds-compress advise --forward-ms --backward-ms --step-ms`:

    stage_times {"stage": 0, "forward_ms": 31.2, "backward_ms": 64.0, "step_ms": 4.1}
"""

import argparse
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from ds_compress.cli.console import importing_deepspeed
from ds_compress.errors import CompressionError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "stage-times",
        help="run a training script unchanged, and print how long each stage computes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--module", action="store_true", help="take SCRIPT as the name of a module, as python -m does"
    )
    parser.add_argument("script", metavar="SCRIPT", help="training script, as for the launcher")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.module and not Path(args.script).is_file():
        raise CompressionError(f"ds-compress stage-times: {args.script}: no such script")
    with importing_deepspeed():
        from ds_compress.runtime.stage_profile import StageTimes
    times = StageTimes()
    rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    sys.argv = [args.script, *rank, *args.arguments]
    if not args.module:
        sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        (runpy.run_module if args.module else runpy.run_path)(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except Exception:  # the script's own, printed as Python does
        traceback.print_exc()
        return 1
    found = times.medians()
    if found is None:
        raise CompressionError(f"ds-compress stage-times: {args.script} trained no pipeline in this process")
    print(f"stage_times {json.dumps(found)}", flush=True)
    return 0
