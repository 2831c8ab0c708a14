"""When something goes wrong every living rank stops in time, and one of them says what it was."""

import re

import pytest

from tests.support.faults import GRACE, SILENT, STAGES, TIMEOUT, TITLES, run

# what the rank that notices first says
SAYS = {
    "kill": r"boundary \d, (forward|backward): rank {at} is gone: ",
    "stop": r"boundary \d, (forward|backward): rank {at} did not answer within 3 s",
    "crash": r"ValueError: a mistake in the model",
    "body": r"packet for boundary \d, (forward|backward), step 2, micro-batch 2: its checksum is another",
    "header": r"packet for boundary \d, (forward|backward), step 2, micro-batch 2: its step is",
    "mismatch": r"ds_compress.seed: rank 0 has \d+, rank \d has \d+; use the same on all nodes",
}
FAST = [("kill", 1, "eager"), ("stop", 2, "eager"), ("header", 0, "blocking")]
ALL = [(fault, at, mode) for fault in TITLES for at in range(STAGES) for mode in ("eager", "blocking")]


def check(fault, at, mode):
    endings = run(fault, at, mode)
    living = [ending for rank, ending in enumerate(endings) if rank != at or fault not in SILENT]
    assert all(ending.seconds <= TIMEOUT + GRACE for ending in living), living
    assert all(ending.code == 1 for ending in living), living
    assert any(re.search(SAYS[fault].format(at=at), ending.message) for ending in living), living


@pytest.mark.parametrize("fault, at, mode", FAST)
def test_living_ranks_stop(fault, at, mode):
    check(fault, at, mode)


@pytest.mark.slow
@pytest.mark.parametrize("fault, at, mode", [case for case in ALL if case not in FAST])
def test_living_ranks_stop_everywhere(fault, at, mode):
    check(fault, at, mode)
