"""Over NCCL no rank would wait for ever, by its rules: no GPU is needed to see that."""

import functools
import itertools
from dataclasses import replace
from tempfile import mkdtemp

import pytest
from torch import distributed as dist

from ds_compress.engine import wiring
from ds_compress.engine.new_kernels import NewKernels
from ds_compress.transport import p2p
from tests.replicas import test_overlap
from tests.support.calls import nothing
from tests.support.pipeline import Block, alike, batches, build, ds_config
from tests.support.pipeline_kinds import KINDS, train
from tests.support.ranks import run_ranks
from tests.support.replicas import train_replicas
from tests.transport.deadlocks import deadlocks
from tests.transport.streams import install

TWO_BITS = {"name": "quantize", "bits": 2}
FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}


def launches(run, prepare):
    device = install(staged=False)
    prepare()
    try:
        run()
    finally:
        device.__exit__(None, None, None)
    return list(device.launches)


def found(ranks, run, *args, prepare=nothing, are_new=False):
    """The deadlocks of what so many ranks launch in `run(*args)`."""
    return deadlocks(run_ranks(ranks, launches, functools.partial(run, *args), prepare), are_new)


@pytest.mark.parametrize("count, are_new", [(2, False), (1, True)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.extended(keep=2)
def test_no_kind_of_pipeline_locks(name, count, are_new):
    """In the first step CUDA loads kernels when they are first launched, and may wait for the device then."""
    kind = replace(KINDS[name], steps=count)
    if not kind.possible():
        pytest.skip("DeepSpeed itself cannot do this here")
    assert not found(kind.world_size, train, kind, alike({"name": "quantize", "bits": 4}), are_new=are_new)


def steps(stages, block, micro_batches=4):
    engine = build(stages, ds_config({"min_numel": 0, **block}, micro_batches=micro_batches))
    data, held_out = batches(), batches(replica=7)
    for _ in range(2):
        engine.train_batch(data)
        engine.eval_batch(held_out, num_micro_batches=5)


def at_depth(stages, depth, **options):
    return found(stages, steps, stages, {"link": {"depth": depth}}, 3 * depth + 2 * stages, **options)


@pytest.mark.parametrize("stages, depth", [(2, 3), *itertools.product((2, 4), (1, 2, 4, 7)), (2, 16)])
@pytest.mark.extended(keep=1)
def test_no_depth_locks(stages, depth):
    """From depth 3 on, each of two neighbours had posted a receive that kept its device from sending what the
    other one waited for, where streams share a queue (CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    assert not at_depth(stages, depth)


def new_kernels(stages, depth, micro_batches):
    """Every step has kernels that none before it had: those of the model, of metrics, and of two codecs."""
    block = {"link": {"depth": depth}, "warmup_steps": 2, "monitor": {"every": 2}, "min_numel": 0}
    csv = {"csv_monitor": {"enabled": True, "output_path": mkdtemp(), "job_name": "x"}}
    engine = build(stages, ds_config({**block, **alike(TWO_BITS)}, micro_batches=micro_batches, **csv))
    data = batches()
    for _ in range(3):
        engine.train_batch(data)
    engine.ds_compress.reconfigure({"0": {"backward": {"codec": "bf16"}}})
    engine.train_batch(data)


@pytest.mark.parametrize("stages, depth", [(2, 3), *itertools.product((2, 3, 4), (1, 2))])
@pytest.mark.extended
def test_loading_kernels_does_not_lock(stages, depth):
    """Both ranks waited so, each with a packet under way that the other one had not come to."""
    assert not found(stages, new_kernels, stages, depth, 3 * depth + 2 * stages, are_new=True)


def resumed_with_new_samples(folder):
    """The first message is of a sample that is known, the second has an extra packet for one that is not."""
    block = {"min_numel": 0, "forward": {"codec": TWO_BITS, "feedback": "aqsgd"}}
    samples = list(itertools.islice(batches(), 8))
    before, engine = (build(2, ds_config(block)) for _ in range(2))
    before.train_batch(iter(samples))
    before.save_checkpoint(folder)
    dist.barrier()
    engine.load_checkpoint(folder)
    engine.train_batch(iter([samples[0], *samples[5:]]))


@pytest.mark.extended
def test_connections_are_made_before_the_first_packet(tmp_path):
    """One rank made that of the extra packets and the other that of the gradients: both waited for ever."""
    assert not found(2, resumed_with_new_samples, str(tmp_path))


def exchange(block, **changes):
    config = ds_config({"replicas": {**FOUR_BITS, "bucket_mb": 1}, **block}, replicas=2, **changes)
    test_overlap.steps(2, config, [Block] * 4, nothing)


TIED = {"tied": FOUR_BITS}
EXCHANGES = {
    "replicas": (4, exchange, {}),
    "replicas, lossless": (4, exchange, alike("lossless")),
    "tied": (3, train_replicas, 3, ds_config(TIED), 4, "tied"),
    "tied, replicas": (
        4,
        train_replicas,
        2,
        ds_config({**TIED, "replicas": FOUR_BITS}, replicas=2),
        4,
        "tied",
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.extended
def test_no_exchange_of_gradients_locks(name):
    assert not found(*EXCHANGES[name])


def post_all():
    p2p.FEW = 33


def post_at_once():
    p2p.Receiver.expect = lambda self, nbytes, count, expect=p2p.Receiver.expect: (
        setattr(self, "_at_once", True) or expect(self, nbytes, count)
    )


def never_in_order():
    NewKernels.must_run_in_order = lambda kernels, context: False


def meet_never():
    """The first schedule is in order, and does not lock; a later one may send the first extra packet, too."""
    wiring.meet = nothing
    never_in_order()


def share_a_group():
    wiring.channel_groups = lambda boundaries, uses, seconds, made=p2p.channel_groups: dict.fromkeys(
        itertools.product((0, 1), uses), made(2, uses[:1], seconds)[0, uses[0]]
    )


@pytest.mark.extended
def test_what_is_left_out_is_found(tmp_path):
    one_queue = {(False, True), (True, True)}
    assert at_depth(2, 3, prepare=post_all).keys() == one_queue
    assert found(2, resumed_with_new_samples, str(tmp_path), prepare=meet_never).keys() == {
        (False, False),
        (False, True),
    }
    assert found(2, steps, 2, {}, prepare=post_at_once)
    assert found(3, steps, 3, {}, prepare=share_a_group)
    assert found(2, new_kernels, 2, 1, 4, prepare=never_in_order, are_new=True)
