"""How long each instruction of DeepSpeed's pipeline engine takes, noted in a training that is not ours."""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

TIMED = {
    "forward_ms": schedule.ForwardPass,
    "backward_ms": schedule.BackwardPass,
    "step_ms": schedule.OptimizerStep,
}


class StageTimes:
    """Of this process, from when it is made."""

    def __init__(self) -> None:
        self._stage: int | None = None
        self._times = defaultdict[str, list[float]](list)
        engine: Any = PipelineEngine
        for name, instruction in TIMED.items():
            engine._INSTRUCTION_MAP[instruction] = self._timed(name, engine._INSTRUCTION_MAP[instruction])

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # ds_compress looks at the signature
        def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
            get_accelerator().synchronize()
            started = time.perf_counter()
            result = function(engine, *args, **kwargs)
            get_accelerator().synchronize()
            self._times[name].append(1e3 * (time.perf_counter() - started))
            self._stage = engine.stage_id
            return result

        return run

    def medians(self) -> dict[str, float] | None:
        """The stage, and ms of each instruction; None where no pipeline was trained."""
        if self._stage is None:
            return None
        return {
            "stage": self._stage,
            **{name: round(statistics.median(times), 3) for name, times in self._times.items()},
        }
