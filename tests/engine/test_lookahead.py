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

from ds_compress.engine.lookahead import Lookahead
from ds_compress.planning.schedule import DepthSchedule
from tests.support.engine_subclasses import PreferenceInference, PreferenceSchedule, Reference
from tests.support.programs import LateSchedule, OnceOnly, ShuffledSchedule


def left_early(schedule, depth=1):
    """The places, counted per kind, of sends whose message left early when the schedule is done."""
    lookahead, done = Lookahead(schedule, None, depth), []
    for step in lookahead.steps():
        for instruction in step:
            kind = type(instruction)
            assert lookahead.current is instruction
            if kind in (ForwardPass, BackwardPass):
                lookahead.leaves_early(kind, instruction.buffer_id)
            assert lookahead.at not in lookahead.left
            done.append(lookahead.at)
        assert lookahead.current is None
    flat = [instruction for step in lookahead.steps() for instruction in list.__iter__(step)]
    assert sorted([*done, *lookahead.left]) == list(range(len(flat)))
    sends = [[n for n, each in enumerate(flat) if type(each) is kind] for kind in (SendActivation, SendGrad)]
    return tuple([number for number, place in enumerate(own) if place in lookahead.left] for own in sends)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
def test_all_messages_of_1f1b_leave_early(stages, micro_batches):
    everything = list(range(micro_batches))
    for stage in range(stages):
        activations = everything if stage < stages - 1 else []
        gradients = everything if stage > 0 else []
        assert left_early(TrainSchedule(micro_batches, stages, stage)) == (activations, gradients)
        assert left_early(InferenceSchedule(micro_batches, stages, stage)) == (activations, [])
        for depth in (2, 3):
            deep = DepthSchedule(micro_batches, stages, stage, depth)
            assert left_early(deep, depth) == (activations, gradients)


def test_a_message_waits_while_another_one_is_to_be_sent_first():
    """The eager link once sent the policy's activations, just computed, instead of the reference's."""
    for schedule in (PreferenceSchedule, PreferenceInference):
        assert left_early(schedule(3, 2, 0)) == ([], [])
    assert left_early(PreferenceSchedule(3, 2, 1)) == ([], [0, 1, 2])


def test_of_two_that_change_places_only_the_one_computed_last_leaves():
    assert left_early(ShuffledSchedule(4, 2, 0))[0] == [0, 2]


def test_no_more_leave_early_than_may_be_under_way():
    """Message 4 waits for message 0, which is taken after everything is computed: do not wait earlier."""
    assert left_early(LateSchedule(9, 2, 0))[0] == [0, 1, 2, 3]


class GivenSchedule(TrainSchedule):
    """The first stage of two runs the steps of a test."""

    def __init__(self, *given):
        super().__init__(1, 2, 0)
        self.given = given

    def steps(self):
        yield from self.given


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
    """A foreign instruction between what is computed and what is sent may."""
    schedule = GivenSchedule([LoadMicroBatch(0), ForwardPass(0), *between, SendActivation(0)])
    assert left_early(schedule)[0] == early


def test_one_instruction_object_may_stand_in_many_places():
    forward, send = ForwardPass(0), SendActivation(0)
    assert left_early(GivenSchedule(*[[forward], [send]] * 3))[0] == [0, 1, 2]


def test_schedules_that_are_iterated_their_own_way_are_left_alone():
    lookahead = Lookahead(OnceOnly(3, 2, 0))
    assert not lookahead.plain and not lookahead.left
    assert list(lookahead.steps()) == []


def followed(change):
    """Return each instruction of two steps with the steps in progress after it; call `change` after each."""
    first = [LoadMicroBatch(0), LoadMicroBatch(1), ForwardPass(0)]
    lookahead, seen = Lookahead(GivenSchedule(first, [SendActivation(0)])), []
    for step in lookahead.steps():
        change(step, -1)
        for number, instruction in enumerate(step):
            seen.append((instruction, lookahead.current))
            change(step, number)
    return seen


@pytest.mark.parametrize("number", [-1, 0, 1, 2])
def test_a_step_may_grow(number):
    def change(step, after):
        if after == number and len(step) == 3:
            step.extend([LoadMicroBatch(7), LoadMicroBatch(8), LoadMicroBatch(9)])

    seen = followed(change)
    assert len(seen) == 7
    assert all(current is (None if made.buffer_id > 2 else made) for made, current in seen)


def test_what_is_made_twice_leaves_once():
    lookahead = Lookahead(GivenSchedule([ForwardPass(0), SendActivation(0)]))
    for step in lookahead.steps():
        for _ in step:
            for nested in ((ForwardPass, 1), (BackwardPass, 0)):
                assert not lookahead.leaves_early(*nested), "a pass that a program runs inside of another"
            assert [lookahead.leaves_early(ForwardPass, 0) for _ in range(2)] == [True, False]
            break
