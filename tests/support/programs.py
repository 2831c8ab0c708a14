"""Programs like public ones over DeepSpeed's pipeline engine: schedules, instructions, training."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from tests.support import pipeline
from tests.support.pipeline import alike, batches, build, ds_config, layers, log_lines, reusing, weights

STEPS = 3
END = (ReduceTiedGrads, ReduceGrads, OptimizerStep)
EIGHT_BITS = alike({"name": "quantize", "bits": 8})
BLOCKS = {
    "blocking": {"link": {"mode": "blocking"}},
    "eager": {"link": {"mode": "eager"}},
    "quantize": EIGHT_BITS,
    "topk blocking": reusing(0.3, link={"mode": "blocking"}),
    "topk eager": reusing(0.3),
}
LOSSLESS = ("blocking", "eager")


def away_from(found):
    """The loss of a policy, beside that of a frozen model."""
    loss_fn = pipeline.loss_fn
    return lambda output, target: loss_fn(output, target) + 0.1 * loss_fn(output, found)


class Reference(schedule.BufferOpInstruction):
    """The pass of a frozen model, whose result crosses in a message of its own, as in preference training."""


class TwiceSchedule(schedule.PipeSchedule):
    """Two messages for each micro-batch: buffer 0 for the reference, buffer 1 for the policy."""

    def steps(self):
        for _ in range(self.micro_batches):
            if self.is_first_stage:
                yield [LoadMicroBatch(1), Reference(0), ForwardPass(1), SendActivation(0), SendActivation(1)]
                yield [RecvGrad(1), BackwardPass(1)]
            else:
                yield [RecvActivation(0), RecvActivation(1), LoadMicroBatch(1), Reference(0)]
                yield [ForwardPass(1), BackwardPass(1), SendGrad(1)]
        yield [kind() for kind in END]

    def num_pipe_buffers(self):
        return 2


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
                    yield [LoadMicroBatch(number), ForwardPass(number)]
                yield [SendActivation(number) for number in self._sent(some)]
        else:
            for number in self._sent(numbers):
                yield [RecvActivation(number)]
                if not self.is_last_stage:
                    yield [ForwardPass(number), SendActivation(number)]
            if self.is_last_stage:
                yield [LoadMicroBatch(number) for number in numbers]
        for number in reversed(numbers):
            # the engine keeps the loss of one forward pass only
            yield [ForwardPass(number) if self.is_last_stage else RecvGrad(number), BackwardPass(number)]
            if not self.is_first_stage:
                yield [SendGrad(number)]
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
            yield sorted(commands, key=lambda command: not isinstance(command, LoadMicroBatch))


class OnceOnly(schedule.TrainSchedule):
    """Iterated in a way of its own."""

    def __iter__(self):
        return iter(list(self.steps()))


class OwnSchedule(PipelineEngine):
    """An engine with a schedule class and an instruction of its own."""

    schedule_class: type = TwiceSchedule

    def _train_schedule(self):
        return self.schedule_class(self.micro_batches, self.num_stages, self.stage_id)

    def _exec_reference(self, buffer_id):
        inputs = self.pipe_buffers["inputs"][1 if self.is_first_stage() else buffer_id]
        with torch.no_grad():
            found = self.module(inputs.clone())
        if self.is_first_stage():
            self.pipe_buffers["outputs"][buffer_id] = 0.5 * found
        else:
            self.module.loss_fn = away_from(found)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, Reference: _exec_reference}


def with_schedule(schedule_class: type) -> type:
    return type(schedule_class.__name__, (OwnSchedule,), {"schedule_class": schedule_class})


@dataclass(frozen=True)
class Program:
    """A training program; all have to train the same with and without ds_compress."""

    engine_class: type = PipelineEngine
    stages: int = 2
    specs: Callable[[], list[Any]] = lambda: layers(6)
    config: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Iterator[Any]] = batches
    prepare: Callable[[Any], None] = lambda engine: None  # after initialize
    before_batch: Callable[[Any, int], None] = lambda engine, step: None
    after_batch: Callable[[Any], list[float]] = lambda engine: []  # gives more to compare
    steps: int = STEPS
    blocks: tuple[str, ...] = tuple(BLOCKS)
    steps_aside: bool = False  # whether its messages are left to DeepSpeed


def train(program: Program, block: dict[str, Any] | None) -> dict[str, Any]:
    """What one rank has to show; `block`: None for stock DeepSpeed."""
    before, deepspeed.PipelineEngine = deepspeed.PipelineEngine, program.engine_class
    try:
        config = ds_config({"min_numel": 64, **block} if block is not None else None, **program.config)
        config = {key: value for key, value in config.items() if value is not None}
        engine = build(program.stages, config, program.specs(), **program.module)
    finally:
        deepspeed.PipelineEngine = before
    program.prepare(engine)
    data, losses, more = program.data(), [], []
    lines = log_lines()
    for step in range(program.steps):
        program.before_batch(engine, step)
        losses.append(engine.train_batch(data).item())
        more += program.after_batch(engine)
    return {
        "class": type(engine).__name__,
        "losses": losses,
        "more": more,
        "weights": weights(engine),
        "left alone": [line for line in lines if "left to DeepSpeed" in line],
    }


def train_all(program: Program) -> dict[str, dict[str, Any]]:
    """One engine after the other in the same processes: stock, then with each block."""
    with contextlib.redirect_stdout(io.StringIO()):
        return {"stock": train(program, None)} | {
            name: train(program, BLOCKS[name]) for name in program.blocks
        }
