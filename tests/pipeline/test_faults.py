"""When something goes wrong every living rank stops in time, with one message, and one of them says what it
was."""

import re

import pytest

from tests.support.faults import FAULTS, GRACE, TIMEOUT, run

# what the rank that notices first says
GONE = r"boundary \d, (forward|backward): rank {at} is gone: |rank {at} is gone"
SILENT = (
    r"boundary \d, (forward|backward): rank \d did not answer within 3 s|rank \d was not heard of for 3 s"
)
CRASHED = r"ValueError: a mistake in the model"
SAYS = {
    "kill": GONE,
    "stop": SILENT,
    "cut": SILENT,
    "crash": CRASHED,
    "body": r"packet for boundary \d, (forward|backward), step 2, micro-batch 2: its checksum is another",
    "header": r"packet for boundary \d, (forward|backward), step 2, micro-batch 2: its step is",
    "mismatch": r"ds_compress.seed: rank 0 has \d+, rank \d has \d+; use the same on all nodes",
    "kill-reduce": GONE,
    "stop-reduce": SILENT,
    "cut-reduce": SILENT,
    "crash-reduce": CRASHED,
    "stop-loss": SILENT,
    "cut-loss": SILENT,
}
FAST = [
    ("kill", 1, "eager"),
    ("stop", 2, "eager"),
    ("header", 0, "blocking"),
    ("cut", 2, "eager"),
    ("stop-loss", 0, "eager"),
    ("kill-reduce", 3, "eager"),
]
ALL = [
    (name, at, mode)
    for name, fault in FAULTS.items()
    for at in range(fault.ranks)
    for mode in ("eager", "blocking")
]


def check(name, at, mode):
    fault = FAULTS[name]
    if not fault.possible:
        pytest.skip("there are no network namespaces here")
    endings = run(name, at, mode)
    living = [ending for rank, ending in enumerate(endings) if rank != at or not fault.silent]
    assert all(ending.seconds <= TIMEOUT + GRACE for ending in living), living
    assert all(ending.code == 1 and not ending.chained for ending in living), living
    said = [message for ending in living for message in ending.messages]
    assert any(re.search(SAYS[name].format(at=at), message) for message in said), living


@pytest.mark.parametrize("name, at, mode", FAST)
def test_living_ranks_stop(name, at, mode):
    check(name, at, mode)


@pytest.mark.slow
@pytest.mark.parametrize("name, at, mode", [case for case in ALL if case not in FAST])
def test_living_ranks_stop_everywhere(name, at, mode):
    check(name, at, mode)
