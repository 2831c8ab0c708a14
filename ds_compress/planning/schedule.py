"""1F1B with more micro-batches under way than DeepSpeed's: the schedule behind `link.depth`.

Stage s of DeepSpeed's `TrainSchedule` has stages - s forward passes done when it asks for its first gradient,
so a slow round trip to the next stage can hide behind one micro-batch. Here it is

    depth * (stages - 1 - s) + 1

of them, if there are as many, and one backward pass to each forward pass from there on. Forward passes come
in the same order, and so do backward passes; only how the two are mixed depends on the depth, and no number
does. All stages work in a common grid of steps, as in DeepSpeed's:

    stage s     forward pass of micro-batch m in step     2m + s
                backward pass                             2m + s + 1 + 2 * depth * (stages - 1 - s)

An activation is sent and received in the step after its forward pass, at any depth. A gradient waits for
2 * depth - 2 steps more: sends that wait for their receiver would lock at a depth over 1.
"""

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.schedule import TrainSchedule

from ds_compress.planning.under_way import under_way


def is_deepspeeds(pipe_schedule: Any) -> bool:
    """Whether it is DeepSpeed's own order of training, no subclass, and nothing put in its place."""
    kind = type(pipe_schedule)
    return (kind.__module__, kind.__qualname__) == (schedule.__name__, "TrainSchedule")


def depth_in_words(asked: int, pipe_schedule: Any) -> str:
    """What the start-up line adds to the name of a link with depth `asked`, by the schedule that it runs."""
    if asked == 1:
        return ""
    if not isinstance(pipe_schedule, DepthSchedule):
        return f", depth {asked} without effect on this schedule"
    less = f" of {asked} for want of micro-batches" if pipe_schedule.depth < asked else ""
    return f", depth {pipe_schedule.depth}{less}"


class DepthSchedule(TrainSchedule):
    """At depth 1 DeepSpeed's own, instruction for instruction (tests/planning/test_schedule.py)."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, depth: int):
        super().__init__(micro_batches, stages, stage_id)
        # Where all forward passes come first already, more makes no difference
        self.depth = min(depth, max(1, micro_batches - 1))
        self._warmup = self.depth * (stages - 1 - stage_id)

    def steps(self) -> Iterator[list[Any]]:
        before = None  # buffer of the step before, if it had something to compute
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
        """Send what the step before has computed, receive what this one needs."""
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
        """As many as micro-batches are under way; at least two, as in DeepSpeed."""
        return max(2, under_way(self.depth, self.micro_batches, self.stages, self.stage_id))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        number, is_backward = divmod(step_id - self.stage_id, 2)
        return number - (self._warmup if is_backward else 0), not is_backward
