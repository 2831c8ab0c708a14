"""Engines that come and go leave no groups, files or threads; in a long run memory does not grow."""

import contextlib
import gc
import io
import itertools
import os
import threading
import weakref

import psutil
import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d

from ds_compress.engine import attach, cleanup, wiring
from ds_compress.errors import CompressionError
from tests.support.pipeline import alike, batches, build, ds_config, layers
from tests.support.ranks import run_ranks
from tests.support.replicas import WIDE, tied_layers, train_steps, wide_layers
from tests.transport.streams import install

ENGINES = 3
STAGES = 3
BLOCKS = {
    "blocking": {"link": {"mode": "blocking"}},
    "eager": {"link": {"mode": "eager"}},
    "second packets": alike("lossless"),
    "connections": {"link": {"connections": 3}},
}


def held():
    """Open files, threads of the process, and those of them that are Python's."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


def collect():
    """Free what is not used; returns when threads that end have ended."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ds_compress"):
            thread.join(60)


def growth(block, drop):
    """What each engine after the second left behind: files, threads, Python's threads."""
    counts, engine = [], None
    for _ in range(ENGINES):
        with contextlib.redirect_stdout(io.StringIO()):
            engine = build(STAGES, ds_config({"min_numel": 0, **block} if block else None), layers(STAGES))
            data = batches()
            for _ in range(2):
                engine.train_batch(data)
            engine.eval_batch(data)
            if drop:
                del engine
                collect()
        counts.append(held())
    return [[after - before for before, after in zip(*pair)] for pair in itertools.pairwise(counts[1:])]


def growths(drop, staged):
    if staged:
        install(staged=True)
        attach.prepare()  # as for an engine with the key: DeepSpeed makes groups of its own then
    stock = growth(None, drop)
    return stock, {name: growth(block, drop) for name, block in BLOCKS.items()}


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "replaced"])
@pytest.mark.extended
def test_nothing_is_left_of_an_engine(drop, staged):
    """Once every engine left its channels' process groups behind: 10 files and 6 threads with two stages."""
    for stock, ours in run_ranks(STAGES, growths, drop, staged):
        for name, grown in ours.items():
            files, threads, python_threads = zip(*grown)
            stock_files, stock_threads, stock_python_threads = zip(*stock)
            assert files == stock_files, name
            # one that has ended is counted for a moment
            assert sum(threads) < sum(stock_threads) + 2, name
            assert sum(python_threads) <= sum(stock_python_threads), name


def after_an_interruption():
    """The loss of an engine that follows one whose step failed."""
    engine, data = build(STAGES, ds_config({}), layers(STAGES)), batches()
    engine.train_batch(data)

    def fail(*_):
        raise ValueError("a mistake in the model")

    engine.module.forward_funcs[0].register_forward_pre_hook(fail)
    with contextlib.suppress(ValueError, CompressionError):
        engine.train_batch(data)
    del engine
    gc.collect()
    return build(STAGES, ds_config({}), layers(STAGES)).train_batch(batches()).item()


def test_what_was_posted_for_packets_that_never_came_holds_nothing_up():
    assert len(set(run_ranks(STAGES, after_an_interruption))) == 1


def groups_of_engines(block, specs, kept=None):
    """By how many groups this rank has more after each engine than after one of DeepSpeed alone, where all
    ranks free one together; rank 1 uses engine `kept` until the next one is there."""
    cleanup.FREED_ALONE, counts = (), []
    for number, own in enumerate((None, block, block, block)):
        before = len(distributed_c10d._world.pg_map)
        engine = build(STAGES, ds_config(own), specs())
        counts.append(len(distributed_c10d._world.pg_map) - before)
        used = [engine] if number == kept and dist.get_rank() == 1 else []
        del engine
        gc.collect()
    del used
    return [count - counts[0] for count in counts]


def test_groups_that_need_both_ranks_are_freed_when_all_have_dropped_the_engine(monkeypatch):
    """Engine 1 is still used on rank 1 when engine 2 is built: its groups go when engine 3 is."""
    monkeypatch.setattr(wiring, "receives_hold_device", lambda device: True)
    # a group of all ranks for each direction, of even boundaries and of odd
    assert run_ranks(STAGES, groups_of_engines, {}, lambda: layers(STAGES), 1) == [[0, 4, 4, -4]] * STAGES


def test_a_rank_without_groups_helps_to_free_those_of_others():
    """It took no part, and the others waited for it while they built the next engine, for ever."""
    block = {"link": {"mode": "blocking"}, "tied": {"codec": "bf16"}}
    first, middle, last = run_ranks(STAGES, groups_of_engines, block, tied_layers)
    assert first == last == [0, 1, 0, 0] and middle == [0, 0, 0, 0]


EF21 = alike({"name": "topk", "density": 0.2}, "ef21")
AQSGD = {"codec": {"name": "quantize", "bits": 4}, "feedback": "aqsgd"}
SOAKED = {"ef21": EF21, "aqsgd": {**EF21, "forward": AQSGD}, "ef21, depth 3": {**EF21, "link": {"depth": 3}}}


def soak(block, steps, settled):
    """Bytes resident and open files after `settled` steps and at the end."""
    engine = build(3, ds_config({**block, "min_numel": 0}), layers(3))
    # the same samples in every epoch of two steps, as AQ-SGD is for; held, so that the data takes no new
    # memory
    source = batches()
    epoch = [next(source) for _ in range(8)]
    measured, process = [], psutil.Process()
    for step in range(steps):
        half = 4 * (step % 2)
        engine.train_batch(iter(epoch[half : half + 4]))
        if step + 1 in (settled, steps):
            measured.append((process.memory_info().rss, process.num_fds()))
    return measured


LONG_RUN = pytest.param(3000, 300, marks=[pytest.mark.slow, pytest.mark.timeout(0)])


@pytest.mark.parametrize("name", SOAKED)
@pytest.mark.parametrize("steps, settled", [(120, 60), LONG_RUN])
@pytest.mark.extended
def test_a_run_is_steady(name, steps, settled):
    ranks = run_ranks(3, soak, SOAKED[name], steps, settled, timeout=7200)
    for (before, files_before), (after, files_after) in ranks:
        assert files_after <= files_before
        assert after < 1.01 * before, f"{before:,} bytes grew to {after:,}"


def exchanging():
    """Whether an engine whose replicas exchange gradients is collected, and how many of its groups go."""
    block = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}}
    engine = build(2, ds_config(block, replicas=2), wide_layers())
    train_steps(engine, 2)
    engine.eval_batch(batches(shape=(8, WIDE)))
    kept, before = weakref.ref(engine), len(distributed_c10d._world.pg_map)
    of_engine = len(engine.ds_compress.stage.groups)
    del engine
    collect()
    return kept() is None, of_engine - (before - len(distributed_c10d._world.pg_map))


def test_an_engine_whose_gradients_leave_early_is_collected():
    """Hooks of its parameters held it, with all its process groups, for ever."""
    assert run_ranks(4, exchanging) == [(True, 0)] * 4
