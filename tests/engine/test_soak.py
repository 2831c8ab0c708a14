"""A long run: neither memory nor file descriptors grow."""

import os

import pytest

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.pipeline import batches, build, ds_config, layers
from tests.support.ranks import run_ranks

PAGE = os.sysconf("SC_PAGE_SIZE")
EF21 = {"codec": {"name": "topk", "density": 0.2}, "feedback": "ef21"}
AQSGD = {"codec": {"name": "quantize", "bits": 4}, "feedback": "aqsgd"}
BLOCKS = {
    "ef21": {"forward": EF21, "backward": EF21},
    "aqsgd": {"forward": AQSGD, "backward": EF21},
    "ef21, depth 3": {"forward": EF21, "backward": EF21, "link": {"depth": 3}},
}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def soak(block, steps, settled):
    """Bytes resident and open files after `settled` steps and at the end."""
    engine = build(3, ds_config({**block, "min_numel": 0}), layers(3))
    # the same samples in every epoch of two steps, as AQ-SGD is for; held, so that the data takes no new
    # memory
    source = batches()
    epoch = [next(source) for _ in range(8)]
    measured = []
    for step in range(steps):
        half = 4 * (step % 2)
        engine.train_batch(iter(epoch[half : half + 4]))
        if step + 1 in (settled, steps):
            measured.append((resident(), len(os.listdir("/proc/self/fd"))))
    return measured


def assert_steady(results):
    for (before, files_before), (after, files_after) in results:
        assert files_after <= files_before
        assert after < 1.01 * before, f"{before:,} bytes grew to {after:,}"


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.extended(keep=1)
def test_a_short_run_is_steady(name):
    assert_steady(run_ranks(3, soak, BLOCKS[name], 120, 60))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", BLOCKS)
def test_3000_steps_are_steady(name):
    assert_steady(run_ranks(3, soak, BLOCKS[name], 3000, 300, timeout=7200))
