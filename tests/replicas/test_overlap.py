"""Gradients between replicas leave during the last backward pass, and the results are the same."""

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.utils.checkpoint import checkpoint

from tests.support.calls import nothing, wrapped
from tests.support.pipeline import Block, batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import MIXTURE, WIDE, Alternating, digest, tied_layers

WIDTH = 192
"""Matrices of 295 kB: three in a bucket of 1 MB."""


class Recomputed(Block):
    """Runs twice; each run is recomputed in a backward pass of its own."""

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


class RecomputedLater(Recomputed):
    recomputes = False

    def forward(self, x):
        return super().forward(x) if self.recomputes else Block.forward(self, x)


class TwoDtypes(Block):
    """DeepSpeed reduces the gradients of each dtype in a call of its own."""

    def __init__(self, width):
        super().__init__(width)
        self.down.to(torch.bfloat16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))).bfloat16()).float()


class Unowned(Block):
    """The optimizer does not get one matrix, which is trained all the same."""

    def __init__(self, width):
        super().__init__(width)
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        self.up.weight.requires_grad_(True)
        return super().forward(x)


class Dropped(Block):
    """Replica 1 lacks gradients of one matrix."""

    def forward(self, x):
        if torch.distributed.get_rank() % 2:
            return x + self.up(self.norm(x))[..., : x.shape[-1]]
        return super().forward(x)


KINDS = {
    "usual": [Block] * 4,
    "two dtypes": [TwoDtypes] * 4,
    "no gradient in some steps": [Alternating, Block, Alternating, Block],
    "recomputed": [Block, Block, Block, Recomputed],
    "frozen later": [Block] * 4,
    # in none of BF16_Optimizer's groups: the first compressed step ended in a KeyError
    "a matrix that the optimizer lacks": [Block, Unowned, Block, Block],
}


def freeze(engine, step):
    if step == 2:
        engine.module.forward_funcs[0].up.weight.requires_grad = False


def steps(stages, config, layers, prepare):
    """Digests of the weights after each step, and the buckets that had left when the last pass was over.

    `prepare` is called with the engine and the number of each step.
    """
    engine = build(stages, config, [LayerSpec(layer, WIDTH) for layer in layers])
    early, started = engine.ds_compress.gradients.early, []
    if early is not None:
        early._start_rest = wrapped(early._start_rest, before=lambda: started.append(early.started))
    dtype = next(engine.module.parameters()).dtype
    data, digests = batches(engine.grid.get_data_parallel_id(), dtype, (8, WIDTH)), []
    for step in range(4):
        prepare(engine, step)
        engine.train_batch(data)
        digests.append(digest(engine))
    return digests, started


def both_ways(stages, replicas, options, layers, prepare=nothing, **changes):
    """What `steps` returns on all ranks with overlap, and without."""
    for overlap in (True, False):
        config = ds_config({"replicas": {**options, "overlap": overlap}}, replicas=replicas, **changes)
        yield run_ranks(stages * replicas, steps, stages, config, layers, prepare)


def digests_of(ranks):
    return [digests for digests, _ in ranks]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 2), (1, 3)])
@pytest.mark.extended(keep=1)
def test_overlap_changes_nothing_but_the_time(kind, stages, replicas):
    options = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", "bucket_mb": 1}
    prepare = freeze if kind == "frozen later" else nothing
    ours, whole = both_ways(stages, replicas, options, KINDS[kind], prepare)
    assert digests_of(ours) == digests_of(whole)
    started = [found for _, found in ours]
    buckets = 3 if stages == 1 else 2
    own = started[-1][::2]  # at the end of the last pass, not in the reduction; a replica of the last stage
    if kind in ("usual", "frozen later"):  # the first step shows how often a pass gives a gradient
        assert own == [0, buckets, buckets, buckets]
    elif kind == "recomputed":
        assert own == [0] * 4
    elif kind.startswith("no gradient"):
        assert own[0] == 0 and min(own[1:]) < max(own[1:])


@pytest.mark.parametrize("codec", [{"name": "quantize", "bits": 4}, {"name": "lowrank", "rank": 4}], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("two dtypes", "frozen later")])
@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 2), (1, 3)])
@pytest.mark.extended
def test_bf16_optimizer_overlaps_too(codec, kind, immediate, stages, replicas):
    """Gradients of the last pass are added to its flat buffers before they leave, and only once."""
    options = {"codec": codec, "feedback": "ef", "bucket_mb": 1}
    bf16 = {"enabled": True, "immediate_grad_update": immediate}
    results = [*both_ways(stages, replicas, options, KINDS[kind], bf16=bf16, gradient_clipping=0.1)]
    for found in results:
        for rank, (digests, _) in enumerate(found):
            assert digests == found[rank - rank % replicas][0], "replicas of a stage are alike"
    if codec["name"] != "lowrank" or replicas == 2:
        # the order of three summands in an all-reduce depends on their place, and so on the bucket
        assert digests_of(results[0]) == digests_of(results[1])
    if kind == "usual":
        buckets = 3 if stages == 1 else 2
        assert results[0][-1][1][::2] == [0, buckets, buckets, buckets]


def repeated(config, from_start):
    """What a rank is told whose last layer begins to be recomputed; each matrix is a bucket of its own."""
    engine = build(1, config, [LayerSpec(Block, 2 * WIDTH), LayerSpec(RecomputedLater, 2 * WIDTH)])
    data, layer = batches(shape=(8, 2 * WIDTH)), engine.module.forward_funcs[1]
    layer.recomputes = from_start
    for _ in range(2):
        engine.train_batch(data)
    layer.recomputes = True
    return None if from_start else refusal(engine.train_batch, data)


@pytest.mark.parametrize("from_start", [True, False])
def test_a_gradient_that_comes_after_its_average_was_sent_is_refused(from_start):
    """If a pass of the first step has given it twice, it is sent after the last pass."""
    block = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "bucket_mb": 1}}
    for said in run_ranks(2, repeated, ds_config(block, replicas=2), from_start):
        assert from_start or "after its last one had been sent; set ds_compress.replicas.overlap" in said


def steps_of_tied(config):
    layers = tied_layers(4 * WIDE)
    layers[1:3] = [LayerSpec(layer, 8 * WIDE) for layer in (Block, Block, Dropped, Dropped)]
    engine = build(2, config, layers)
    data = batches(engine.grid.get_data_parallel_id(), shape=(2, 4 * WIDE))
    for _ in range(3):
        engine.train_batch(data)
    return digest(engine)


@pytest.mark.extended
def test_replica_that_lacks_gradients_lets_tied_stages_finish():
    """Replica 0 waited in its last stage for 1, whose last stage waited for its first, that one for 0's."""
    codec = {"name": "quantize", "bits": 4}
    block = {"replicas": {"codec": codec, "bucket_mb": 1}, "link": {"timeout_s": 300}}
    digests = run_ranks(4, steps_of_tied, ds_config(block, replicas=2))
    assert digests[0] == digests[1] and digests[2] == digests[3]


def sends_early(config):
    return build(1, config, MIXTURE["experts"]()).ds_compress.gradients.early is not None


def test_experts_exchange_tokens_before_gradients_leave():
    block = {"replicas": {"codec": {"name": "quantize", "bits": 4}}}
    assert run_ranks(2, sends_early, ds_config(block, replicas=2)) == [False, False]


def halve(parameter):
    parameter.grad.mul_(0.5)


def make_hooks(engine, step=0):
    for parameter in engine.module.parameters() if step == 0 else ():
        parameter.register_post_accumulate_grad_hook(halve)


def make_hooks_within(engine, step):
    if step == 1:
        first = next(each for each in engine.module.modules() if isinstance(each, torch.nn.Linear))
        within = first.register_forward_pre_hook(lambda *_: (within.remove(), make_hooks(engine))[1])


@pytest.mark.parametrize("make", [make_hooks, make_hooks_within], ids=["before a step", "within a step"])
@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.extended(keep=1)
def test_gradients_leave_after_the_hooks_of_a_program(changes, make):
    """Made after `initialize`: in bf16 they found no gradient and raised, in fp32 that of a parameter that
    completes a bucket was ignored."""
    options = {"codec": {"name": "quantize", "bits": 4}, "bucket_mb": 1}
    ours, whole = both_ways(1, 2, options, [Block] * 4, make, **changes)
    assert digests_of(ours) == digests_of(whole)
    assert [started[-2] for _, started in ours] == [3, 3], "at the end of the last pass, not in the reduction"
