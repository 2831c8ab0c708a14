"""The choice of a depth: as deep as it pays, and no deeper than memory allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_compress.planning.depth import MIN_GAIN, MemoryBudget, choose_depth, micro_batches_in_flight
from ds_compress.planning.schedule import DepthSchedule
from ds_compress.planning.step_time import LinkSpeed, MessageCost, TransferPlan, Workload, step_seconds

SIZE = MessageCost(1_000_000)
PLAN = TransferPlan(SIZE, SIZE, eager=True)


def uniform(stages, micro_batches):
    return Workload((0.01,) * stages, (0.02,) * stages, micro_batches)


def chosen(stages=4, micro_batches=32, network=None, held=1.0, packets=0.0, limit=float("inf")):
    budgets = [MemoryBudget(held, packets, limit)] * stages
    return choose_depth(uniform(stages, micro_batches), PLAN, network or LinkSpeed(1e8, 0.04), budgets)


def test_a_fast_link_stays_at_depth_1():
    choice = chosen(network=LinkSpeed(1e12))
    assert choice.depth == 1 and choice.gain == 1 and not choice.capped


def test_a_far_link_goes_deeper_and_says_what_it_gains():
    choice = chosen()
    assert choice.depth > 2 and choice.gain > 1.5 and not choice.capped
    again = step_seconds(uniform(4, 32), TransferPlan(SIZE, SIZE, True, choice.depth), LinkSpeed(1e8, 0.04))
    assert choice.step == again and choice.step_at_1 == chosen(limit=0).step


@given(
    stages=st.integers(2, 4),
    micro_batches=st.integers(1, 12),
    bandwidth=st.sampled_from([1e6, 1e7, 1e8, 1e10]),
    latency=st.sampled_from([0.0, 0.01, 0.1]),
    limit=st.floats(0, 40),
    packets=st.floats(0, 2),
)
def test_memory_is_never_above_the_limit_and_no_depth_that_fits_is_much_faster(
    stages, micro_batches, bandwidth, latency, limit, packets
):
    network = LinkSpeed(bandwidth, latency)
    choice = chosen(stages, micro_batches, network, packets=packets, limit=limit)
    assert choice.depth == 1 or max(choice.memory) <= limit
    budget, plans = MemoryBudget(1.0, packets, limit), {}
    for depth in range(1, max(2, micro_batches)):
        taken = [budget.required(depth, micro_batches, stages, stage) for stage in range(stages)]
        if depth == 1 or max(taken) <= limit:
            plan = TransferPlan(SIZE, SIZE, True, depth)
            plans[depth] = step_seconds(uniform(stages, micro_batches), plan, network)
    assert choice.step <= (1 + MIN_GAIN) ** 2 * min(plans.values())


@pytest.mark.parametrize("limit, depth", [(3.9, 1), (4, 1), (6.9, 1), (7, 2), (9.9, 2), (10, 3)])
def test_memory_caps_it(limit, depth):
    """Stage 0 of 4 holds 3 * depth + 1 micro-batches."""
    choice = chosen(limit=limit)
    assert choice.depth == depth and choice.capped
    assert choice.memory == tuple(depth * (3 - stage) + 1.0 for stage in range(4))


def test_packets_take_memory_too():
    assert chosen(limit=10, packets=1).depth == 2


@given(st.integers(1, 9), st.integers(1, 40), st.integers(2, 6))
def test_micro_batches_in_flight_are_those_of_the_schedule(depth, micro_batches, stages):
    for stage in range(stages):
        most = held = 0
        for commands in DepthSchedule(micro_batches, stages, stage, depth).steps():
            for command in commands:
                held += {"ForwardPass": 1, "BackwardPass": -1}.get(type(command).__name__, 0)
                most = max(most, held)
        assert most == micro_batches_in_flight(depth, micro_batches, stages, stage)


def test_a_boundary_of_its_own_speed():
    """One slow link between fast ones is what counts."""
    slow, fast = LinkSpeed(1e7, 0.05), LinkSpeed(1e12)
    one = choose_depth(uniform(4, 32), PLAN, (fast, slow, fast), [MemoryBudget(1.0)] * 4)
    assert choose_depth(uniform(4, 32), PLAN, (fast,) * 3, [MemoryBudget(1.0)] * 4).depth == 1 < one.depth
    assert one.step > step_seconds(uniform(4, 32), PLAN, fast)
