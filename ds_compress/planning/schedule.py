"""1F1B with more micro-batches in flight than DeepSpeed's: the schedule behind `link.depth`.

Stage s of DeepSpeed's `TrainSchedule` has done stages - s forward passes when it asks for its first gradient,
so one micro-batch hides a slow round trip to the next stage. Here it has done

    depth * (stages - 1 - s) + 1

forward passes, or all if there are fewer; after that one backward pass follows each forward pass. Only how
forward and backward passes alternate depends on the depth: their own orders and all results stay the same.
As in DeepSpeed's schedule, all stages share a grid of steps:

    stage s     forward pass of micro-batch m in step     2m + s
                backward pass                             2m + s + 1 + 2 * depth * (stages - 1 - s)

An activation is sent and received in the step after its forward pass, at any depth. A gradient waits for
2 * depth - 2 steps more: sends that wait for their receiver would deadlock at a depth over 1.
"""

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.schedule import TrainSchedule


def is_deepspeed_schedule(pipe_schedule: Any) -> bool:
    """Return whether it is DeepSpeed's own `TrainSchedule`, not a subclass or a replacement."""
    kind = type(pipe_schedule)
    return (kind.__module__, kind.__qualname__) == (schedule.__name__, "TrainSchedule")


class DepthSchedule(TrainSchedule):
    """1F1B at a given depth; at depth 1 equal to DeepSpeed's, instruction for instruction."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, depth: int):
        super().__init__(micro_batches, stages, stage_id)
        # Once all forward passes come first, a greater depth changes nothing
        self.depth = min(depth, max(1, micro_batches - 1))
        self._warmup = self.depth * (stages - 1 - stage_id)

    def steps(self) -> Iterator[list[Any]]:
        before = None  # buffer of the previous step, if that computed something
        last = 2 * (self.micro_batches + self.depth * (self.stages - 1)) - 1
        for step in range(last + 1):
            micro_batch, is_forward = self._step_to_micro_batch(step)
            valid = 0 <= micro_batch < self.micro_batches
            buffer = micro_batch % self.num_pipe_buffers() if valid else None
            commands = list(self._exchange(is_forward, before, buffer))
            if buffer is not None:
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(schedule.LoadMicroBatch(buffer))
                commands.append((schedule.ForwardPass if is_forward else schedule.BackwardPass)(buffer))
            if step == last:
                commands += [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]
            before = buffer
            yield commands

    def _exchange(self, is_forward: bool, before: int | None, buffer: int | None) -> Iterator[Any]:
        """Send what the previous step computed, receive what this one needs."""
        if is_forward and not self.is_first_stage:
            if before is not None:
                yield schedule.SendGrad(before)
            if buffer is not None:
                yield schedule.RecvActivation(buffer)
        elif not is_forward and not self.is_last_stage:
            if buffer is not None:
                yield schedule.RecvGrad(buffer)
            if before is not None:
                yield schedule.SendActivation(before)

    def num_pipe_buffers(self) -> int:
        """Return the most micro-batches in flight, at least two, as in DeepSpeed."""
        return max(2, min(self._warmup + 1, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        number, is_backward = divmod(step_id - self.stage_id, 2)
        return number - (self._warmup if is_backward else 0), not is_backward
