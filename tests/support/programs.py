"""Programs like public ones over DeepSpeed's pipeline engine: schedules, instructions, training."""

from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.support.pipeline import alike, reusing
from tests.support.pipeline_kinds import Kind

END = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
EIGHT_BITS = alike({"name": "quantize", "bits": 8})
BLOCKS = {
    "blocking": {"link": {"mode": "blocking"}},
    "eager": {"link": {"mode": "eager"}},
    "quantize": EIGHT_BITS,
    "topk blocking": reusing(0.3, link={"mode": "blocking"}),
    "topk eager": reusing(0.3),
}


class ReversedSchedule(schedule.PipeSchedule):
    """All forward passes, then all backward passes, the last one first."""

    sent_after = 1  # forward passes, at the first stage
    order = (0,)  # of the messages of so many

    def steps(self):
        numbers = range(self.micro_batches)
        if self.is_first_stage:
            for first in range(0, self.micro_batches, self.sent_after):
                some = numbers[first : first + self.sent_after]
                for number in some:
                    yield [schedule.LoadMicroBatch(number), schedule.ForwardPass(number)]
                yield [schedule.SendActivation(number) for number in self._sent(some)]
        else:
            for number in self._sent(numbers):
                yield [schedule.RecvActivation(number)]
                if not self.is_last_stage:
                    yield [schedule.ForwardPass(number), schedule.SendActivation(number)]
            if self.is_last_stage:
                yield [schedule.LoadMicroBatch(number) for number in numbers]
        for number in reversed(numbers):
            # the engine keeps the loss of one forward pass only
            yield [
                schedule.ForwardPass(number) if self.is_last_stage else schedule.RecvGrad(number),
                schedule.BackwardPass(number),
            ]
            if not self.is_first_stage:
                yield [schedule.SendGrad(number)]
        yield [kind() for kind in END]

    def _sent(self, numbers):
        count = len(self.order)
        return [numbers[first + place] for first in range(0, len(numbers), count) for place in self.order]

    def num_pipe_buffers(self):
        return self.micro_batches


class LateSchedule(ReversedSchedule):
    """Nothing is sent before everything is computed; more messages than the link lets be under way."""

    sent_after = 100


class ShuffledSchedule(ReversedSchedule):
    """Of two micro-batches that are computed the second one is sent first."""

    sent_after = 2
    order = (1, 0)


class LoadsFirst(schedule.TrainSchedule):
    """A micro-batch is loaded before anything is sent or received."""

    def steps(self):
        for commands in super().steps():
            yield sorted(commands, key=lambda command: not isinstance(command, schedule.LoadMicroBatch))


class OnceOnly(schedule.TrainSchedule):
    """Iterated in a way of its own."""

    def __iter__(self):
        return iter(list(self.steps()))


class OwnSchedule(PipelineEngine):
    """An engine with a schedule class of its own."""

    schedule_class: type

    def _train_schedule(self):
        return self.schedule_class(self.micro_batches, self.num_stages, self.stage_id)


def with_schedule(schedule_class: type) -> type:
    return type(schedule_class.__name__, (OwnSchedule,), {"schedule_class": schedule_class})


def program(engine_class: type = PipelineEngine, **options: Any) -> Kind:
    """A training program; all have to train the same with and without ds_compress."""
    return Kind("", engine_class=engine_class, evaluates=False, **{"steps": 3, **options})
