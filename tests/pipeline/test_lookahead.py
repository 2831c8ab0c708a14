"""Which messages may leave before their place in the schedule."""

import pytest
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

from ds_compress.pipeline.lookahead import Lookahead
from tests.support.foreign import LateSchedule, OnceOnly, Reference, ShuffledSchedule, TwiceSchedule


def left_early(schedule):
    """The places, counted per kind, of sends whose message left early when the schedule is done."""
    lookahead, early = Lookahead(schedule), {SendActivation: [], SendGrad: []}
    made = {ForwardPass: SendActivation, BackwardPass: SendGrad}
    numbers = dict.fromkeys(early, 0)
    for step in lookahead.steps():
        for instruction in step:
            kind = type(instruction)
            assert lookahead.current is instruction
            if kind in made and lookahead.leaves_early(kind, instruction.buffer_id):
                lookahead.gone[made[kind], instruction.buffer_id] = True
            if kind in early:
                early[kind] += (
                    [numbers[kind]] if lookahead.gone.pop((kind, instruction.buffer_id), False) else []
                )
                numbers[kind] += 1
        assert lookahead.current is None
    assert lookahead.early == sum(map(len, early.values()))
    return early[SendActivation], early[SendGrad]


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
def test_all_messages_of_1f1b_leave_early(stages, micro_batches):
    everything = list(range(micro_batches))
    for stage in range(stages):
        activations = everything if stage < stages - 1 else []
        gradients = everything if stage > 0 else []
        assert left_early(TrainSchedule(micro_batches, stages, stage)) == (activations, gradients)
        assert left_early(InferenceSchedule(micro_batches, stages, stage)) == (activations, [])


def test_a_message_waits_while_another_one_is_to_be_sent_first():
    """The eager link trained wrong: it sent the policy's activations, just computed, in place of the
    reference's."""
    assert left_early(TwiceSchedule(3, 2, 0)) == ([], [])
    assert left_early(TwiceSchedule(3, 2, 1)) == ([], [0, 1, 2])


def test_of_two_that_change_places_only_the_one_computed_last_leaves():
    assert left_early(ShuffledSchedule(4, 2, 0))[0] == [0, 2]


def test_no_more_leave_early_than_may_be_under_way():
    """Message 4 waits until message 0 was taken: in the order of the schedule that is not before everything
    is computed, so it must not be waited for earlier."""
    assert left_early(LateSchedule(9, 2, 0))[0] == [0, 1, 2, 3]


class Changed(TrainSchedule):
    """A foreign instruction between what is computed and what is sent."""

    between: tuple = ()

    def steps(self):
        yield [LoadMicroBatch(0), ForwardPass(0), *self.between, SendActivation(0)]


@pytest.mark.parametrize(
    "between, early",
    [
        ([], [0]),
        ([LoadMicroBatch(1)], [0]),
        ([LoadMicroBatch(0)], []),
        ([ForwardPass(1)], [0]),
        ([Reference(1)], []),
    ],
)
def test_what_may_touch_the_buffer_keeps_the_message(between, early):
    schedule = Changed(1, 2, 0)
    schedule.between = tuple(between)
    assert left_early(schedule)[0] == early


def test_one_instruction_object_may_stand_in_many_places():
    class Same(TrainSchedule):
        def steps(self):
            forward, send = ForwardPass(0), SendActivation(0)
            for _ in range(3):
                yield [forward]
                yield [send]

    assert left_early(Same(3, 2, 0))[0] == [0, 1, 2]


def test_schedules_that_are_iterated_their_own_way_are_left_alone():
    lookahead = Lookahead(OnceOnly(3, 2, 0))
    assert not lookahead.plain and not lookahead.early
    assert list(lookahead.steps()) == []
