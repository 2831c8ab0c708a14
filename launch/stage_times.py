"""Run a DeepSpeed pipeline training script unchanged, and print how long each stage computes.

    deepspeed ... launch/stage_times.py train.py --its --own arguments

Every rank ends with one line: its stage, and the medians over all micro-batches, in ms, of the forward and of
the backward pass, what `ds-compress advise --forward-ms --backward-ms` asks for, and of the optimizer step
(`--step-ms`):

    stage_times {"stage": 0, "forward_ms": 31.2, "backward_ms": 64.0, "step_ms": 4.1}
"""

import json
import runpy
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

TIMED = {
    "forward_ms": schedule.ForwardPass,
    "backward_ms": schedule.BackwardPass,
    "step_ms": schedule.OptimizerStep,
}

times: dict[str, list[float]] = defaultdict(list)
stages: set[int] = set()


def timed(name, function):
    def run(self, *args, **kwargs):
        get_accelerator().synchronize()
        started = time.perf_counter()
        result = function(self, *args, **kwargs)
        get_accelerator().synchronize()
        times[name].append(1e3 * (time.perf_counter() - started))
        stages.add(self.stage_id)
        return result

    return run


for name, instruction in TIMED.items():
    PipelineEngine._INSTRUCTION_MAP[instruction] = timed(name, PipelineEngine._INSTRUCTION_MAP[instruction])

# The launcher puts --local_rank before the name of the script to run
script = next(index for index, word in enumerate(sys.argv[1:], 1) if word.endswith(".py"))
sys.argv = [sys.argv[script], *sys.argv[1:script], *sys.argv[script + 1 :]]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
print(f"stage_times {json.dumps({'stage': min(stages), **medians})}", flush=True)
