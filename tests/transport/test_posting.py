"""No schedule waits for itself, at any depth, stage count and micro-batch count.

Neither with the limits of the links, nor on a device that a posted receive or a send holds until its packet
has come or been taken.
"""

from collections import Counter

from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.schedule import InferenceSchedule, SendActivation, SendGrad
from hypothesis import given
from hypothesis import strategies as st

from ds_compress.planning.schedule import DepthSchedule
from ds_compress.transport.p2p import packets_in_flight, posted_ahead

SENT_TO = {SendActivation: (1, stock.RecvActivation), SendGrad: (-1, stock.RecvGrad)}
"""How many stages away a message is asked for, and by what."""
MADE_BY = {SendActivation: stock.ForwardPass, SendGrad: stock.BackwardPass}
COMING = {asked: (-away, send) for send, (away, asked) in SENT_TO.items()}
PIPELINES = st.integers(2, 6), st.integers(1, 20), st.integers(1, 5)  # stages, micro-batches, depth


class Pipeline:
    """The programs of all stages, (kind, micro-batch) each, and what the links let happen of them."""

    def __init__(self, schedules, depth=1, announced=True, waits=()):
        """`announced`: receives are posted ahead; `waits`: sends that stay until they are asked for."""
        self.stages = len(schedules)
        self.most, self.ahead = packets_in_flight(depth), posted_ahead(depth) if announced else 1
        self.waits = waits
        self.programs = [self._program(stage, schedule) for stage, schedule in enumerate(schedules)]
        self.length = sum(map(len, self.programs))

    def _program(self, stage, schedule):
        counts, program = Counter(), []
        early = {made_by: send for send, made_by in MADE_BY.items() if send not in self.waits}
        for kind in (type(instruction) for step in schedule.steps() for instruction in step):
            number, counts[kind] = counts[kind], counts[kind] + 1
            if kind in MADE_BY.values() or kind in COMING or kind in self.waits:
                program.append((kind, number))
            if kind in early and 0 <= stage + SENT_TO[early[kind]][0] < self.stages:
                program.append((early[kind], number))
        return program

    def taken(self, stage, send, number, begun):
        """Whether the receive of this message is posted, with the one asked for or with the first."""
        away, asked = SENT_TO[send]
        first = number if send in self.waits else max(0, number - self.ahead + 1)
        return (stage + away, asked, first) in begun

    def lets(self, stage, kind, number, begun):
        """Whether what is begun is done too."""
        if kind in COMING:
            away, send = COMING[kind]
            return (stage + away, send, number) in begun
        if kind in self.waits:
            return self.taken(stage, kind, number, begun)
        if kind in SENT_TO and number + 1 >= self.most:  # the memory of the next message
            return self.taken(stage, kind, number + 1 - self.most, begun)
        return True

    def begun(self, frozen=None, launched=0):
        """Return (stage, kind, micro-batch) of all that begins if `frozen` launches only `launched`."""
        position, begun, before = [0] * self.stages, set(), None
        while before != (position, len(begun)):
            before = list(position), len(begun)
            for stage, program in enumerate(self.programs):
                for event in program[position[stage] : launched if stage == frozen else None]:
                    begun.add((stage, *event))
                    if not self.lets(stage, *event, begun):
                        break
                    position[stage] += 1
        return begun

    def moments(self, kinds):
        """(stage, kind, micro-batch, all that begins when nothing after it is launched there)."""
        for stage, program in enumerate(self.programs):
            for launched, (kind, number) in enumerate(program):
                if kind in kinds:
                    yield stage, kind, number, self.begun(stage, launched + 1)

    def locks(self):
        return len(self.begun()) < self.length

    def messages_that_need_more(self, micro_batches):
        """Return messages that are sent and not taken, or posted and not sent, without further launches."""
        for stage, kind, number, begun in self.moments(SENT_TO):
            if not self.taken(stage, kind, number, begun):
                yield stage, kind, number
        for stage, kind, number, begun in self.moments(COMING):
            away, send = COMING[kind]
            last = number if send in self.waits else min(number + self.ahead, micro_batches) - 1
            if (stage + away, send, last) not in begun:
                yield stage, kind, number


def pipeline(stages, micro_batches, depth, schedule=DepthSchedule, **options):
    own = (depth,) if schedule is DepthSchedule else ()
    schedules = [schedule(micro_batches, stages, stage, *own) for stage in range(stages)]
    return Pipeline(schedules, depth, **options)


@given(*PIPELINES, st.booleans())
def test_no_schedule_waits_for_itself(stages, micro_batches, depth, announced):
    assert not pipeline(stages, micro_batches, depth, announced=announced).locks()
    assert not pipeline(stages, micro_batches, depth, InferenceSchedule, announced=announced).locks()


@given(*PIPELINES, st.booleans())
def test_on_a_device_no_message_under_way_needs_anything_more_of_its_rank(
    stages, micro_batches, depth, announced
):
    found = pipeline(stages, micro_batches, depth, announced=announced)
    assert not list(found.messages_that_need_more(micro_batches))


@given(*PIPELINES)
def test_the_links_of_a_depth_carry_deepspeeds_order_too(stages, micro_batches, depth):
    for schedule in (stock.TrainSchedule, InferenceSchedule):
        assert not pipeline(stages, micro_batches, depth, schedule).locks()


@given(*PIPELINES)
def test_shape_messages_that_wait_lock_nothing(stages, micro_batches, depth):
    assert not pipeline(stages, micro_batches, depth, announced=False, waits=(SendActivation,)).locks()


def test_why_dynamic_shape_stays_at_depth_1_where_sends_hold_the_device():
    """Stage 1 has sent a gradient; stage 0 asks for it when stage 1 takes a shape message, which is later."""
    dynamic = {"announced": False, "waits": (SendActivation,)}
    assert not list(pipeline(3, 8, 1, **dynamic).messages_that_need_more(8))
    assert (1, SendGrad, 0) in pipeline(3, 8, 2, **dynamic).messages_that_need_more(8)


def test_why_the_blocking_link_stays_at_depth_1():
    assert not pipeline(2, 4, 1, announced=False, waits=tuple(SENT_TO)).locks()
    assert pipeline(2, 4, 2, announced=False, waits=tuple(SENT_TO)).locks()
