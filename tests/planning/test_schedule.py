"""The schedule of every depth: DeepSpeed's own at depth 1, and what a schedule has to keep at any."""

from collections import defaultdict

import pytest
from deepspeed.runtime.pipe import schedule as pipe
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from hypothesis import given
from hypothesis import strategies as st

from ds_compress.planning.depth import micro_batches_in_flight
from ds_compress.planning.schedule import DepthSchedule, is_deepspeed_schedule

PIPELINES = st.integers(1, 6), st.integers(1, 24), st.integers(1, 5)  # stages, micro-batches, depth


def flat(schedule):
    return [instruction for step in schedule.steps() for instruction in step]


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", range(1, 13))
def test_depth_1_is_deepspeeds_own(stages, micro_batches):
    for stage in range(stages):
        ours = DepthSchedule(micro_batches, stages, stage, 1)
        stock = pipe.TrainSchedule(micro_batches, stages, stage)
        assert list(map(repr, ours.steps())) == list(map(repr, stock.steps()))
        assert ours.num_pipe_buffers() == stock.num_pipe_buffers()


@given(*PIPELINES)
def test_every_message_is_sent_and_received_once_and_computed_in_order(stages, micro_batches, depth):
    """After so many forward passes comes the first backward pass."""
    for stage in range(stages):
        schedule = DepthSchedule(micro_batches, stages, stage, depth)
        kinds = [type(i) for i in flat(schedule) if type(i) in (ForwardPass, BackwardPass)]
        ahead = micro_batches_in_flight(depth, micro_batches, stages, stage)
        rest = micro_batches - ahead
        assert kinds == [ForwardPass] * ahead + [BackwardPass, ForwardPass] * rest + [BackwardPass] * ahead
        assert max(2, ahead) == schedule.num_pipe_buffers()
        assert type(flat(schedule)[-1]) is pipe.OptimizerStep

        buffers = defaultdict(list)
        for instruction in flat(schedule):
            buffers[type(instruction)].append(getattr(instruction, "buffer_id", None))
        expected = {pipe.LoadMicroBatch: stage in (0, stages - 1), ForwardPass: True, BackwardPass: True}
        expected |= dict.fromkeys((pipe.RecvActivation, pipe.SendGrad), stage > 0)
        expected |= dict.fromkeys((pipe.SendActivation, pipe.RecvGrad), stage < stages - 1)
        in_order = [number % schedule.num_pipe_buffers() for number in range(micro_batches)]
        for kind, comes in expected.items():
            assert buffers[kind] == (in_order if comes else [])


@given(*PIPELINES)
def test_a_buffer_is_filled_used_and_left_before_it_is_filled_again(stages, micro_batches, depth):
    for stage in range(stages):
        uses = defaultdict(list)
        for instruction in flat(DepthSchedule(micro_batches, stages, stage, depth)):
            if "buffer_id" in instruction.kwargs:
                uses[instruction.buffer_id].append(type(instruction))
        comes, sends = stage > 0, stage < stages - 1
        fill = [pipe.RecvActivation] * comes + [pipe.LoadMicroBatch] * (not (comes and sends))
        back = {(pipe.RecvGrad, pipe.SendActivation), (pipe.SendActivation, pipe.RecvGrad)} if sends else {()}
        orders = [(*fill, ForwardPass, *some, BackwardPass, *[pipe.SendGrad] * comes) for some in back]
        length = len(orders[0])
        for kinds in uses.values():
            rounds = [tuple(kinds[first : first + length]) for first in range(0, len(kinds), length)]
            assert all(one in orders for one in rounds), rounds


def test_only_deepspeeds_own_order_is_known_as_such():
    changed = type("Changed", (pipe.TrainSchedule,), {})
    put_in_its_place = type("TrainSchedule", (pipe.TrainSchedule,), {"__module__": "zero_bubble"})
    assert is_deepspeed_schedule(pipe.TrainSchedule(4, 2, 0))
    assert not is_deepspeed_schedule(put_in_its_place(4, 2, 0))
    assert not is_deepspeed_schedule(changed(4, 2, 0))
    assert not is_deepspeed_schedule(DepthSchedule(4, 2, 0, 2))


def test_a_depth_over_the_micro_batches_is_what_they_allow():
    assert DepthSchedule(3, 4, 0, 9).depth == 2
    assert DepthSchedule(1, 4, 0, 9).depth == 1
