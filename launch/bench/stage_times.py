"""Run a DeepSpeed pipeline training script unchanged, and print how long each stage computes.

    stage_times.py train.py --its --own arguments
    stage_times.py --module ds_compress.hf.finetune train.json

Each rank prints a line at the end, the median ms of the schedule's instructions:

    stage_times {"stage": 0, "forward_ms": 31.2, "backward_ms": 64.0, "step_ms": 4.1}
"""

import functools
import json
import runpy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

INSTRUCTIONS = {
    "forward_ms": schedule.ForwardPass,
    "backward_ms": schedule.BackwardPass,
    "step_ms": schedule.OptimizerStep,
}


def timed(times: list[float], stages: set[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an instruction so that its ms are added to `times`, and its engine's stage to `stages`."""

    @functools.wraps(function)  # ds_compress looks at the signature
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        get_accelerator().synchronize()
        started = time.perf_counter()
        result = function(engine, *args, **kwargs)
        get_accelerator().synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        stages.add(engine.stage_id)
        return result

    return run


def main() -> None:
    rank = [word for word in sys.argv[1:] if word.startswith("--local_rank")]  # added by the launcher
    words = [word for word in sys.argv[1:] if word not in rank]
    is_module = words[0] == "--module"
    script, *arguments = words[is_module:]
    times, stages = defaultdict[str, list[float]](list), set[int]()
    engine: Any = PipelineEngine
    for name, instruction in INSTRUCTIONS.items():
        function = engine._INSTRUCTION_MAP[instruction]
        engine._INSTRUCTION_MAP[instruction] = timed(times[name], stages, function)
    sys.argv = [script, *rank, *arguments]
    if not is_module:
        sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        (runpy.run_module if is_module else runpy.run_path)(script, run_name="__main__")
    except SystemExit as end:  # many scripts end with sys.exit(main())
        if end.code:
            raise
    (stage,) = stages
    medians = {name: round(statistics.median(each), 3) for name, each in times.items()}
    print(f"stage_times {json.dumps({'stage': stage, **medians})}", flush=True)


if __name__ == "__main__":
    main()
