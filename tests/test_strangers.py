"""Strangers on every port that a job listens on, torch's among them: the job goes on."""

import contextlib
import os
import threading

import pytest

from tests.support.network import disturb, flood, listening_ports
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks

BLOCK = {"min_numel": 0, "forward": {"codec": "bf16"}, "link": {"mode": "eager", "timeout_s": 300}}
PAUSE = 0.1  # seconds between the strangers' visits


@contextlib.contextmanager
def disturbed(find_ports):
    """Strangers send to the ports that it finds until the end of the context, and at least once."""
    ended = threading.Event()

    def run():
        disturb(find_ports())
        while not ended.wait(PAUSE):
            disturb(find_ports())

    strangers = threading.Thread(target=run)
    strangers.start()
    try:
        yield
    finally:
        ended.set()
        strangers.join()


def train(has_strangers, steps=6):
    engine, data = build(2, ds_config(BLOCK)), batches()
    with contextlib.ExitStack() as stack:
        if has_strangers:
            stack.enter_context(disturbed(lambda: listening_ports(os.getpid())))
            for _, port in engine.ds_compress.watchdog._connections.addresses if engine.global_rank else ():
                stack.enter_context(flood(port))
        return [engine.train_batch(data).item() for _ in range(steps)]


@pytest.mark.extended
def test_training_goes_on():
    assert run_ranks(2, train, True) == run_ranks(2, train, False)
