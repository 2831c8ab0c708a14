"""Run a DeepSpeed pipeline training script whose passes take a given time, most of it asleep.

    PASS_MS=40 deepspeed ... launch/bench/sleeping_passes.py train.py --its --own arguments

Stages that do not compute can be more than there are cores. A forward pass takes PASS_MS, a backward pass
twice that, or as long as its computing takes.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

SECONDS = float(os.environ["PASS_MS"]) / 1e3


def lasting(seconds, function):
    @functools.wraps(function)  # ds_compress looks at the signature
    def run(*args, **kwargs):
        end = time.perf_counter() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return run


for instruction, passes in ((schedule.ForwardPass, 1), (schedule.BackwardPass, 2)):
    stock = PipelineEngine._INSTRUCTION_MAP
    stock[instruction] = lasting(passes * SECONDS, stock[instruction])

# The launcher puts --local_rank before the name of the script to run
script = next(index for index, word in enumerate(sys.argv[1:], 1) if not word.startswith("-"))
sys.argv = [sys.argv[script], *sys.argv[1:script], *sys.argv[script + 1 :]]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
