"""Parameters that BF16_Optimizer gathers, as differences in few bits; and its norm, of partitions."""

import itertools

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_compress.codec import CODECS
from ds_compress.message.layout import Counters
from ds_compress.replicas.parameters import ParameterExchange, Range
from ds_compress.replicas.transfers import Replicas
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import SPECS, WIDE, assert_alike, run_replicas, wide_layers

BF16 = {"bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}


ZERO_1 = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
"""With bf16: else DeepSpeed would take another optimizer."""


def block(parameters, **changes):
    return {"replicas": {"codec": {"name": "quantize", "bits": 4}, "parameters": parameters, **changes}}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (1, 3), (2, 2), (2, 3)])
@pytest.mark.extended(keep=1)
def test_replicas_stay_alike(zero, specs, bits, stages, replicas):
    """I1, and tied copies over stages too: `Projection` is in the first and in the last stage."""
    settings = {"replicas": replicas, "gradient_clipping": 0.1, **(ZERO_1 if zero else {}), **BF16}
    config = ds_config(block(bits, feedback="loco"), **settings)
    results = run_replicas(stages, replicas, config, 6, specs)
    assert_alike(results)
    assert all(each["sent"] for each in results)
    tied = [each["weights"][name] for each in results for name in each["weights"] if "tied" in name]
    assert len(tied) == (len(results) if specs == "tied" else 0)
    assert all(torch.equal(each, tied[0]) for each in tied)


def follow(config):
    """How far parameters are from the optimizer's, and how far those moved, after each of some steps."""
    engine = build(1, config, wide_layers())
    data = batches(engine.grid.get_data_parallel_id(), torch.bfloat16, (8, WIDE))
    optimizer, found = engine.optimizer, []
    master, rank = optimizer.fp32_groups_flat_partition[0], engine.grid.get_data_parallel_id()
    start = master.detach().clone()
    for _ in range(20):
        engine.train_batch(data)
        parameters = optimizer.bf16_partitioned_groups[0][rank].float()
        found.append([(parameters - master).norm().item(), (master - start).norm().item()])
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.extended
def test_parameters_follow_the_optimizers(bits):
    """Errors do not add up: each difference holds what the one before has lost."""
    exact = run_ranks(2, follow, ds_config(block("none"), replicas=2, **BF16))
    ours = run_ranks(2, follow, ds_config(block(bits), replicas=2, **BF16))
    for rounded, compressed in zip(exact, ours):
        step = compressed[0][1]  # what the first step moved
        largest = {4: 0.25, 8: 0.05}[bits] * step
        assert all(0 < off < known + largest for (off, _), (known, _) in zip(compressed, rounded))


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 3)])
@pytest.mark.extended(keep=1)
def test_the_norm_is_that_of_all_gradients(stages, replicas):
    """With a codec that hardly loses anything the clipped steps are DeepSpeed's, up to rounding."""
    config = ds_config(None, replicas=replicas, gradient_clipping=0.05, **BF16)
    stock = run_replicas(stages, replicas, config, 4, "tied")
    nearly = {"replicas": {"codec": "bf16"}}
    ours = run_replicas(stages, replicas, {**config, "ds_compress": nearly}, 4, "tied")
    assert_alike(ours)
    assert len({float(each["norm"]) for each in ours}) == 1
    assert float(ours[0]["norm"]) == pytest.approx(float(stock[0]["norm"]), rel=1e-2)
    assert float(stock[0]["norm"]) > 0.05


def test_bytes_of_gradients_and_parameters():
    """16 + 16 + 16 bits a value with DeepSpeed, twice 4.25 bits here."""
    for each in run_replicas(1, 2, ds_config(block(4), replicas=2, **BF16)):
        assert 5 < each["raw"] / each["sent"] < 5.7


def gathered(bucket_bytes):
    """Return the largest error of a buffer after two gathers, and the bytes sent.

    One large parameter lies in the first partition alone, small ones of odd sizes in all.
    """
    replicas = Replicas(dist.get_world_size(), dist.get_rank())
    generator = torch.Generator().manual_seed(0)
    codec, sent = CODECS.build({"name": "quantize", "bits": 8}, "parameters"), Counters()
    exchange = ParameterExchange(replicas, codec, bucket_bytes, sent, seed=1, has_checksum=False)
    sizes = [40_000, *[4100, 333] * 18]
    ends = itertools.accumulate(sizes, initial=0)
    places = enumerate(zip(ends, sizes))
    ranges = [Range(start, n, None if n == 333 else at, 100) for at, (start, n) in places]
    flat = torch.zeros(-(-sum(sizes) // 12) * 12, dtype=torch.bfloat16)  # padded
    for step in range(2):
        new = torch.randn(flat.numel(), generator=generator)
        exchange.gather(flat, new.chunk(replicas.size)[replicas.rank], ranges, step)
    error = (flat - new)[: sum(sizes)].abs().max().item()
    return flat, error, sent.wire_bytes


def gathered_in_buckets():
    return [gathered(nbytes) for nbytes in (10**9, 40_000, 12_000)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_buckets_cost_no_bytes(replicas):
    """A large parameter made its owner's bucket large, to which those of the others were padded: 7B models
    sent up to four times the bytes."""
    results = run_ranks(replicas, gathered_in_buckets)
    for (_, _, least), *others in results:
        for _, error, nbytes in others:
            assert 0 < error < 0.05
            assert nbytes < 1.05 * least
    for at in range(3):
        assert all(torch.equal(each[at][0], results[0][at][0]) for each in results)


def test_other_optimizers_are_refused():
    for line in run_ranks(2, refusal, build, 1, ds_config(block(8), replicas=2), wide_layers()):
        assert line.startswith("ds_compress.replicas.parameters: 8 is not allowed with") and "BF16" in line


class Words(nn.Module):
    """An embedding whose rows are no whole groups of a codec."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(512, 96), nn.Linear(96, 96)

    def forward(self, ids):
        return self.out(self.words(ids))


def moved_rows(config):
    """How far each row of the embedding moved in steps that used the even ones, rms."""
    engine = build(1, config, [LayerSpec(Words)], loss_fn=lambda out, y: (out - y).float().square().mean())
    (words,) = (p for p in engine.module.parameters() if p.shape == (512, 96))
    before, generator = words.detach().float(), torch.Generator().manual_seed(engine.global_rank)

    def data():
        while True:
            ids = 2 * torch.randint(256, (4, 8), generator=generator)
            yield ids, torch.randn(4, 8, 96, generator=generator).bfloat16()

    for source in [data()] * 4:
        engine.train_batch(source)
    return (words.detach().float() - before).square().mean(1).sqrt()


@pytest.mark.parametrize("bits", [4, 8])
def test_unused_rows_stay(bits):
    """Groups crossed rows: rows moved by up to .0008 with 4 bits, though their master weights stayed."""
    block = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", "parameters": bits}
    adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0}}
    config = ds_config({"replicas": block}, replicas=2, bf16={"enabled": True}, optimizer=adam)
    for moved in run_ranks(2, moved_rows, config):
        assert (moved[1::2] == 0).all() and moved[::2].mean() > 1e-3
