"""Gradients between replicas: exact under `none`, equal on all replicas, and nothing is lost."""

import functools
import itertools
import math

import pytest
import torch

from ds_compress.codec import TensorSpec
from ds_compress.config.replicas import ReplicasOptions, build_replica_codec
from ds_compress.feedback.state import residuals
from ds_compress.replicas.exchange import Exchange
from ds_compress.replicas.slices import GRADIENT, MIN_NUMEL, Gradient, Slice, SliceCodec, Slices
from ds_compress.replicas.transfers import Replicas
from tests.support.pipeline import batches, build, ds_config
from tests.support.pipeline_kinds import fp16_on_cpu
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import KINDS, SPECS, WIDE, assert_alike, run_replicas, train_replicas, wide_layers

SWITCHES = ("reduce_scatter", "contiguous_gradients", "use_multi_rank_bucket_allreduce")
ZERO_OPTIONS = [{"reduce_bucket_size": 20_000}, *({switch: False} for switch in SWITCHES)]
"""Ways of ZeRO-1 to its all-reduce."""

QUANTIZE = {"codec": {"name": "quantize", "bits": 4}}
EIGHT_BITS = {"name": "quantize", "bits": 8}


def block(**replicas):
    return {"replicas": {**QUANTIZE, **replicas}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.extended(keep=1)
def test_none_is_deepspeeds_all_reduce(kind, stages, replicas):
    """I3. Also in the warm-up, in which nothing is compressed yet."""
    settings = {**KINDS[kind], "replicas": replicas}
    stock = run_replicas(stages, replicas, ds_config(**settings))
    for compressed in ({"codec": "none"}, {**QUANTIZE, "feedback": "ef", "warmup_steps": 9}):
        ours = run_replicas(stages, replicas, ds_config({"replicas": compressed}, **settings))
        assert [each["digests"] for each in ours] == [each["digests"] for each in stock]
        assert [each["losses"] for each in ours] == [each["losses"] for each in stock]
        assert not any(each["sent"] for each in ours)


def difference(results, others):
    """The largest difference of weights, over the largest change in training that SGD made of them."""
    weights = [(ours["weights"], theirs["weights"]) for ours, theirs in zip(results, others)]
    pairs = [(ours[name], theirs[name]) for ours, theirs in weights for name in ours if name != "start"]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("feedback", ["ef", "none", "loco", "ef_mixed"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (1, 3), (2, 2), (2, 3)])
@pytest.mark.extended(keep=1)
def test_replicas_stay_alike(kind, specs, feedback, stages, replicas):
    """I1, with clipping: its factor comes from the compressed gradients, on each replica by itself. DeepSpeed
    makes copies of tied weights equal when they are built; nothing would after that."""
    config = ds_config(None, replicas=replicas, gradient_clipping=0.1, **KINDS[kind])
    bits, most = (6, 0.04) if feedback == "ef_mixed" else (8, 0.01)  # ef_mixed sends two packets
    compressed = {**config, "ds_compress": block(codec={"name": "quantize", "bits": bits}, feedback=feedback)}
    results = run_replicas(stages, replicas, compressed, 4, specs)
    assert_alike(results)
    assert all(each["sent"] for each in results if specs != "small" or each["stage"] == 0)
    assert all(math.isfinite(loss) for each in results for loss in each["losses"])
    copies = [value for each in results for name, value in each["weights"].items() if "tied" in name]
    assert len(copies) == len(results) * (specs == "tied") and all(map(torch.equal, copies, copies[1:]))
    stock = run_replicas(stages, replicas, config, 4, specs)
    assert 0 < difference(results, stock) < most


def test_dualpipev_has_replicas_too():
    dualpipev = pytest.importorskip("deepspeed.runtime.pipe.dualpipev")  # from DeepSpeed 0.19.8 on
    train = functools.partial(train_replicas, module_class=dualpipev.DualPipeVModule)
    results = run_ranks(4, train, 2, ds_config(block(), replicas=2))
    assert_alike(results)
    assert all(each["sent"] for each in results)


def test_experts_are_averaged_over_their_own_replicas():
    """Ranks 0 and 2 have one expert, 1 and 3 the other: DeepSpeed averages these, in groups of their own."""
    config = ds_config(None, replicas=4)
    stock = run_replicas(1, 4, config, 1, "experts")
    ours = run_replicas(1, 4, {**config, "ds_compress": block(codec=EIGHT_BITS)}, 1, "experts")
    for rank, (own, exact) in enumerate(zip(ours, stock)):
        assert own["sent"]
        for name, value in own["weights"].items():
            if name == "start":
                continue
            is_expert = "experts" in name
            assert torch.equal(value, ours[rank % 2 if is_expert else 0]["weights"][name]), name
            is_exact = is_expert or value.dim() == 1 or value.numel() < MIN_NUMEL
            assert torch.equal(value, exact["weights"][name]) == is_exact, name
    names = [name for name in ours[0]["weights"] if "experts" in name]
    assert any(not torch.equal(*(each["weights"][name] for each in ours[:2])) for name in names)


@pytest.mark.parametrize("kind", ["bf16", "bf16 zero 1"])
@pytest.mark.extended(keep=1)
def test_a_stage_may_have_no_large_matrix(kind):
    """The norm is summed up over partitions on all stages, or on none: else ranks would wait for ever."""
    config = ds_config(block(), replicas=2, gradient_clipping=0.1, **KINDS[kind])
    results = run_replicas(2, 2, config, 4, "small")
    assert_alike(results)
    assert [bool(each["sent"]) for each in results] == [each["stage"] == 0 for each in results]
    assert len({float(each["norm"]) for each in results}) == 1


@pytest.mark.parametrize("options", ZERO_OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("kind", ["bf16 accumulation", "fp16 zero 1"])
@pytest.mark.extended(keep=1)
def test_every_way_of_zero(kind, options):
    config = ds_config(None, replicas=2, **{**KINDS[kind], "zero_optimization": {"stage": 1, **options}})
    stock = run_replicas(1, 2, config, 4, "none")
    ours = run_replicas(1, 2, {**config, "ds_compress": block(codec=EIGHT_BITS)}, 4, "none")
    assert_alike(ours)
    assert all(each["sent"] for each in ours) and 0 < difference(ours, stock) < 0.01


@pytest.mark.parametrize("feedback", ["ef", "loco"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.extended
def test_overflows_skip_the_steps_that_deepspeed_skips(stages, feedback):
    """I4. The last step overflows as well, in one replica alone; residuals are in units without the scale."""
    kind = KINDS["fp16 zero 1"]
    config = ds_config(replicas=2, **{**kind, "fp16": {**kind["fp16"], "initial_scale_power": 24}})
    overflows = (14, 17, 19)
    stock = run_replicas(stages, 2, config, 20, "wide", overflows)
    ours = run_replicas(stages, 2, {**config, "ds_compress": block(feedback=feedback)}, 20, "wide", overflows)
    assert [each["skipped"] for each in ours] == [each["skipped"] for each in stock]
    assert [each["scales"] for each in ours] == [each["scales"] for each in stock]
    skipped = stock[0]["skipped"]
    assert all(skipped[step - 1] < skipped[step] for step in overflows) and skipped[-1] < 10
    assert_alike(ours)
    found = [size for each in ours for key, size in each["residuals"] if "codes" not in key]
    assert found and max(found) < 0.1


def skipped_step(config):
    """Residuals before and after a step that overflows."""
    fp16_on_cpu()
    engine = build(1, config, wide_layers())
    data = batches(engine.grid.get_data_parallel_id(), next(engine.module.parameters()).dtype, (8, WIDE))
    slices = engine.ds_compress.gradients.exchange.slices
    engine.train_batch(data)
    before = [{key: value.clone() for key, value in own.items()} for own in slices.saved().values()]
    # one matrix alone overflows: residuals of the others have changed by the time that DeepSpeed looks
    last = [p for p in engine.module.parameters() if p.dim() > 1][-1]
    last.register_hook(lambda grad: grad * torch.inf)
    engine.train_batch(data)
    after = [*slices.saved().values()]
    return engine.skipped_steps, before, after


@pytest.mark.parametrize("kind", ["fp16 zero 1", "bf16", "bf16 zero 1"])
@pytest.mark.parametrize("feedback", ["ef", "loco"])
@pytest.mark.extended(keep=1)
def test_a_skipped_step_leaves_residuals_as_they_were(feedback, kind):
    """In bf16 DeepSpeed skips a step whose gradients are not finite too, but residuals had changed."""
    config = ds_config(block(feedback=feedback), replicas=2, **KINDS[kind])
    for skipped, before, after in run_ranks(2, skipped_step, config):
        assert skipped == 1 and any(before)
        for old, new in zip(before, after, strict=True):
            assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)


def frozen_later(config):
    """How far a matrix moves in each of the steps before it is frozen, and after."""
    fp16_on_cpu()
    engine = build(1, config, wide_layers())
    matrix = [p for p in engine.module.parameters() if p.dim() > 1][-1]
    data = batches(engine.grid.get_data_parallel_id(), matrix.dtype, (8, WIDE))
    moved = []
    for step in range(4):
        matrix.requires_grad_(step < 2)
        before = matrix.detach().clone()
        engine.train_batch(data)
        moved.append((matrix.detach() - before).abs().max().item())
    return moved[:2], moved[2:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.extended(keep=1)
def test_a_weight_that_is_frozen_in_training_stays_as_it_is(kind):
    """In bf16 its buffer of gradients stays, with zeros in it, and replicas exchanged the residual there."""
    config = ds_config(block(feedback="ef"), replicas=2, **KINDS[kind])
    for trained, frozen in run_ranks(2, frozen_later, config):
        assert all(trained) and not any(frozen)


def test_residuals_of_a_checkpoint_survive_a_skipped_first_step():
    """They were lost: slices are made in that step, and had no residuals before it."""
    slices, gradient = Slices(2), Gradient(3, torch.zeros(30_000))
    slices.load({6: {"residual": torch.ones(15_104)}})
    before = slices.saved()
    first, _ = slices.of(gradient)
    first.memory = {"residual": torch.zeros(15_104)}
    slices.load(before)
    (first, _) = slices.of(gradient)
    assert torch.equal(first.memory["residual"], torch.ones(15_104))


PARTS = (7_000, 20_001, 256)  # values of parameters, each a bucket of its own
BUCKET_BYTES = 4 * (20_001 + 255)  # no two of them fit


def exchange_of_all(bucket_bytes, **options):
    """An exchange of all ranks, with checksums; this rank, and their number."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    codec = build_replica_codec(ReplicasOptions(**options), "x")
    replicas = Replicas(size, rank, [torch.distributed.group.WORLD])
    return Exchange(replicas, codec, bucket_bytes, 1234, True), rank, size


def sums(codec, feedback, steps, owner):
    """What the replicas put in, what came out, and the residuals left: all should add up."""
    exchange, rank, size = exchange_of_all(BUCKET_BYTES, codec=codec, feedback=feedback)
    exchange.measure()
    generator = torch.Generator().manual_seed(rank)
    given, came = torch.zeros(sum(PARTS), dtype=torch.float64), torch.zeros(sum(PARTS), dtype=torch.float64)
    outputs = []
    for step in range(steps):
        values = torch.randn(sum(PARTS), generator=generator) * 10 ** (step % 3)
        given += values.double()
        gradients = [Gradient(number, part, owner) for number, part in enumerate(values.split(PARTS))]
        exchange.average(gradients, 1 / size, 64.0, step)
        came += values.double() * size
        outputs.append(values)
    assert exchange.sent.messages == steps * len(PARTS)
    assert math.isnan(exchange.quality[0]) == (owner not in (None, rank))  # other replicas have no average
    assert (exchange.sent.wire_bytes == 0) == (rank == owner)
    left = []
    for numel, gradient in zip(PARTS, gradients):
        own = []
        for each in exchange.slices.of(gradient):
            part = torch.zeros(each.spec.numel, dtype=torch.float64)
            part += sum(64 * e.double() for e in residuals(each.memory, "backward"))
            part += sum(64 * size * e.double() for e in residuals(each.memory, "forward"))
            own.append(part)
        left.append(torch.cat(own)[:numel])
    return {"given": given, "came": came, "left": torch.cat(left), "outputs": outputs}


CODECS = [
    {"name": "quantize", "bits": 4},
    {"name": "quantize", "bits": 3, "rounding": "stochastic"},
    {"name": "quantize", "bits": 3, "rounding": "dither"},
    {"name": "topk", "density": 0.01},
    {"name": "fp8"},
    {"name": "entropy", "bits": 2.5},
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: "-".join(map(str, codec.values())))
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("owner", [None, 1], ids=["gathered", "to-owner"])
@pytest.mark.extended(keep=2)
def test_nothing_is_lost(codec, replicas, owner):
    """I2: n times the averages are the sum of the gradients but for the residuals of both halves."""
    results = run_ranks(replicas, sums, codec, "ef", 7, owner)
    total = sum(each["given"] for each in results)
    left = sum(each["left"] for each in results)
    receivers = results if owner is None else [results[owner]]
    for each in receivers:
        assert torch.allclose(each["came"] + left, total, rtol=0, atol=1e-3 * total.abs().max())
        assert all(map(torch.equal, each["outputs"], receivers[0]["outputs"]))
    without = run_ranks(replicas, sums, codec, "none", 7, owner)[owner or 0]
    assert not torch.allclose(without["came"], total, rtol=0, atol=1e-3 * total.abs().max())


def test_parts_of_a_matrix_have_residuals_of_their_own():
    """Of a matrix that ZeRO-1 cuts in the middle DeepSpeed's Muon wants both halves on every replica: they
    had one residual, which each half added to the other."""
    slices, halves = Slices(2), torch.ones(2, 2048)
    found = [each for n, half in enumerate(halves) for each in slices.of(Gradient(3, half, start=n * 2048))]
    assert len({id(each.memory) for each in found}) == len({each.number for each in found}) == 4
    assert [each.owner for each in found] == [0, 1, 0, 1] and len(slices.saved()) == 4
    codec = SliceCodec(build_replica_codec(ReplicasOptions(codec="bf16"), "x"), 1, True, 0)
    for own in found:  # the number of a slice may have more bits than there are in a packet
        packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
        codec.encode(own, torch.ones(own.spec.shape), packet, GRADIENT, 0, 0)
        assert codec.decode(own, packet, GRADIENT, 0, 0).eq(1).all()


def test_small_gradients_of_fp16_keep_their_digits():
    """They were divided by the loss scale in fp16: with DeepSpeed's 2^16, those of 1e-7 lost 17 %, and those
    of 1e-8 all."""
    torch.manual_seed(0)
    scaled = (2**16 * torch.randn(1000) * torch.logspace(-8, -4, 1000)).half()
    own = Slice(0, 0, TensorSpec((1024,), torch.float32))
    assert torch.equal(own.take(scaled, 0, 2.0**16)[:1000], scaled.float() / 2**16)


def draw_errors(config):
    """Return the coding error of one packet of slice 0, of other values on each rank."""
    engine = build(2, config, wide_layers())
    exchange = engine.ds_compress.gradients.exchange
    codec, replica = exchange.codec, exchange.replicas.rank
    own = Slice(0, 0, TensorSpec((9_216,), torch.float32))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(own.spec.shape, generator=generator)
    packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
    codec.encode(own, x, packet, GRADIENT, 0, replica)
    return engine.stage_id, codec.decode(own, packet, GRADIENT, 0, replica) - x


def test_stages_draw_different_bits():
    """Equal draws in two stages made their errors alike: cosine 0.47 at 0.5 bits."""
    config = ds_config(block(codec={"name": "entropy", "bits": 0.5, "rounding": "dither"}), replicas=2)
    results = run_ranks(4, draw_errors, config)
    assert [stage for stage, _ in results] == [0, 0, 1, 1]
    for (_, one), (_, other) in itertools.combinations(results, 2):
        assert abs(torch.cosine_similarity(one, other, dim=0)) < 0.1


def test_a_slice_that_its_codec_refuses_is_not_sent(monkeypatch):
    """Boundaries asked the codec, exchanges did not."""
    monkeypatch.setattr("ds_compress.codecs.entropy.LARGEST_NUMEL", 1000)
    codec = SliceCodec(build_replica_codec(ReplicasOptions(codec="entropy", feedback="ef"), ""), 0, False, 0)
    refused = refusal(codec.layout, Slice(3, 0, TensorSpec((1024,), torch.float32)))
    assert refused.startswith("gradients, slice 3: codec entropy") and "allowed: 1,000; " in refused


def exchange_damaged(damage):
    """The error of an exchange in which the packets of replica 1 are damaged on their way."""
    exchange, _, size = exchange_of_all(10**6, codec="quantize")
    stock = torch.distributed.all_to_all_single

    def damaged(received, packets, *args, **kwargs):
        work = stock(received, packets, *args, **kwargs)
        work.wait()
        received[received.numel() // 2 :][damage] ^= 1
        return work

    torch.distributed.all_to_all_single = damaged
    return refusal(exchange.average, [Gradient(0, torch.randn(20_000))], 1 / size, 1.0, 5)


SAID = {0: "not a packet", 8: "step is 4, expected 5", 6: "its slice is", 20: "fingerprint", 99: "damaged"}
"""By the byte that is damaged."""


@pytest.mark.parametrize("damage", SAID)
@pytest.mark.extended(keep=1)
def test_other_packets_are_refused(damage):
    for error in run_ranks(2, exchange_damaged, damage):
        assert "replica 1" in error and SAID[damage] in error
