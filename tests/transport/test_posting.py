"""Receives posted ahead on a GPU hold it until their packet comes: that must need nothing that is launched
later."""

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, RecvActivation, RecvGrad, TrainSchedule

KINDS = (ForwardPass, BackwardPass, RecvActivation, RecvGrad)
SENT_BY = {
    RecvActivation: (-1, ForwardPass),
    RecvGrad: (1, BackwardPass),
}  # stages away, and what makes the packet


def program(micro_batches, stages, stage):
    """What a stage does in DeepSpeed's order: (kind, micro-batch)."""
    counts, done = dict.fromkeys(KINDS, 0), []
    for step in TrainSchedule(micro_batches, stages, stage).steps():
        for kind in (type(instruction) for instruction in step):
            if kind in KINDS:
                done.append((kind, counts[kind]))
                counts[kind] += 1
    return done


def possible(programs, frozen, launched):
    """All (stage, kind, micro-batch) that can happen if stage `frozen` launches only its first
    instructions."""
    position, done, moved = [0] * len(programs), set(), True
    while moved:
        moved = False
        for stage, instructions in enumerate(programs):
            for kind, number in instructions[position[stage] : launched if stage == frozen else None]:
                away, made_by = SENT_BY.get(kind, (0, None))
                if away and (stage + away, made_by, number) not in done:
                    break
                done.add((stage, kind, number))
                position[stage] += 1
                moved = True
    return done


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
def test_the_packet_after_the_one_asked_for_needs_nothing_more_of_this_rank(stages, micro_batches):
    programs = [program(micro_batches, stages, stage) for stage in range(stages)]
    for stage, instructions in enumerate(programs):
        for launched, (kind, number) in enumerate(instructions):
            if kind in SENT_BY and number + 1 < micro_batches:
                away, made_by = SENT_BY[kind]
                assert (stage + away, made_by, number + 1) in possible(programs, stage, launched)


def test_the_first_gradient_needs_the_warm_up():
    """Why none is posted at the start of a step."""
    programs = [program(4, 2, stage) for stage in range(2)]
    assert (1, BackwardPass, 0) not in possible(programs, 0, 0)
