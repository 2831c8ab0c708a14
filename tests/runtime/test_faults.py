"""When something goes wrong every living rank stops in time with one message, and one says what it was."""

import math
import re

import pytest

from tests.support.faults import FAULTS, WHILE_PROBED, run

SILENT = r"rank {at} (did not answer within|was not heard of for) 3 s"
GONE = r"rank {at} is gone|Connection (closed|reset) by peer"
MOMENT = r"packet for boundary \d, (forward|backward), step 2, micro-batch 2: "

# what the rank that notices first says, wherever it happens unless that is named
SAYS = {
    "kill": r"boundary \d, (forward|backward): rank {at} is gone: ",
    "stop": SILENT,
    "cut": r"rank \d (did not answer within 3 s|was not heard of for 3 s|is gone: )",
    "crash": r"ValueError: a mistake in the model",
    "body": MOMENT + "its checksum is another",
    "header": MOMENT + "its step is",
    "mismatch": r"ds_compress.seed: rank 0 has \d+, rank \d has \d+; use the same on all nodes",
    "kill-reduce": GONE,
    "cut-reduce": r"was not heard of for 3 s",
    "kill-exchange": r"gradients between replicas: .*(" + GONE + ")",
    "kill-tied": r"gradients of tied weights between stages: .*(" + GONE + ")",
    "cut-loss": r"rank \d (did not answer within|was not heard of for) 3 s",
}
EACH = enumerate(sorted(FAULTS, key=lambda fault: FAULTS[fault].hosts))
FAST = [(fault, n % FAULTS[fault].ranks, ("eager", "blocking")[n % 2], 1) for n, fault in EACH]
FAST += [("stop", 1, "eager", 3)]
SLOW = [
    pytest.param(fault, at, mode, depth, marks=pytest.mark.slow)
    for fault in FAULTS
    for at in range(FAULTS[fault].ranks)
    for mode, depth in (("eager", 1), ("blocking", 1), ("eager", 3))
    if (fault, at, mode, depth) not in FAST
]


@pytest.mark.parametrize("fault, at, mode, depth", [*FAST, *SLOW])
@pytest.mark.extended(keep=1)
def test_living_ranks_stop(fault, at, mode, depth):
    """Once those that stood in a collective of DeepSpeed stood there for its 30 minutes."""
    if not FAULTS[fault].possible:
        pytest.skip("two hosts cannot be made here")
    check(fault, at, run(fault, at, mode, depth), FAULTS[fault].silent)


@pytest.mark.parametrize("fault, at", [("kill-probe", 1), ("stop-probe", 2)])
@pytest.mark.extended
def test_living_ranks_stop_while_connections_are_probed(fault, at):
    check(fault, at, run(fault, at, "eager"), WHILE_PROBED[fault].silent)


def check(fault, at, endings, is_silent):
    living = [ending for rank, ending in enumerate(endings) if rank != at or not is_silent]
    told = "\n".join(map(str, living))  # whole, where pytest would shorten a list
    assert all(ending.seconds < math.inf for ending in living), told
    assert all(ending.code == 1 for ending in living), told
    assert all(len(ending.messages) == 1 and not ending.chained for ending in living), told
    says = SAYS.get(fault, SAYS[fault.partition("-")[0]]).format(at=at)
    assert any(re.search(says, ending.messages[0]) for ending in living), told
