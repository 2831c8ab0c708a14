"""Rows of a parameter whose gradient is exactly zero stay where they are, whatever the codec."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from ds_compress.codec import TensorSpec, build
from ds_compress.config.replicas import ReplicasOptions, build_replica_codec
from ds_compress.errors import CompressionError
from ds_compress.replicas.slices import GRADIENT, HALVES, Gradient, RowSpan, Slice, SliceCodec, Slices
from ds_compress.simulate.replicas import SimulatedReplicas
from ds_compress.sites.simulation import SimulatedRounds
from ds_compress.transport.packet_memory import Packet

USED, UNUSED = range(0, 512, 2), range(1, 512, 2)
FOUR = {"name": "quantize", "bits": 4}
CODECS = {
    "ef": (FOUR, "ef"),
    "ef in 8 bits": (FOUR, {"name": "ef", "dtype": "int8"}),
    "loco": (FOUR, "loco"),
    "dither": ({**FOUR, "rounding": "dither"}, "none"),
    "stochastic": ({**FOUR, "rounding": "stochastic"}, "none"),
    "rotated": ({**FOUR, "hadamard": True}, "ef"),
    "entropy with dither": ({"name": "entropy", "bits": 3, "rounding": "dither"}, "none"),
    "minmax": ({"name": "minmax", "bits": 4}, "ef"),
    "topk": ({"name": "topk", "values": FOUR}, "ef"),
}


@pytest.mark.parametrize("width", [96, 100, 128])
@pytest.mark.parametrize("codec, feedback", CODECS.values(), ids=CODECS)
def test_unused_embeddings_stay(codec, feedback, width):
    """Groups crossed rows, so unused rows got noise, and Adam divides it by its own size: after 100 steps at
    width 96 they had moved by .0011 (4 bits, `ef`) and by .0096 (dither), where used ones had moved by
    .012."""
    torch.manual_seed(0)
    model = nn.Embedding(512, width)
    block = {"replicas": {"codec": codec, "feedback": feedback}}
    replicas = SimulatedReplicas(model, {"ds_compress": block}, 2)
    optimizer, before = torch.optim.Adam(model.parameters(), 1e-3), model.weight.detach().clone()
    for step in range(6):
        for replica in range(2):
            generator = torch.Generator().manual_seed(2 * step + replica)
            ids = torch.tensor(USED)[torch.randint(len(USED), (256,), generator=generator)]
            (model(ids) * torch.randn(256, width, generator=generator)).sum().backward()
            replicas.collect()
            optimizer.zero_grad()
        replicas.average()
        optimizer.step()
    moved = (model.weight.detach() - before).square().mean(1).sqrt()
    assert (moved[list(UNUSED)] == 0).all() and moved[list(USED)].mean() > 1e-4


@pytest.mark.parametrize("width", [96, 128])
def test_rows_that_no_replica_moved_stay_in_outer_steps(width):
    """Their delta of exact zeros was decoded as noise, which the outer step added to the anchor."""
    torch.manual_seed(0)
    models = [nn.Embedding(512, width) for _ in range(2)]
    codec = {"name": "quantize", "bits": 4, "rounding": "dither"}
    block = {"replicas": {"codec": codec, "feedback": "none", "every": 2, "outer": {"delay": 0}}}
    rounds, before = SimulatedRounds(models, {"ds_compress": block}), models[0].weight.detach().clone()
    for _ in range(4):
        for model in models:
            with torch.no_grad():
                model.weight[::2] += 0.01 * torch.randn(256, width)
        rounds.end_step()
    moved = (models[0].weight.detach() - before).square().mean(1).sqrt()
    assert (moved[1::2] == 0).all() and moved[::2].mean() > 1e-3


def test_partitions_begin_and_end_within_rows():
    """As those of ZeRO, which cut a parameter anywhere."""
    whole = torch.randn(40, 100)
    whole[::3] = 0
    flat, cuts = whole.view(-1), [0, 1037, 1038, 2950, 4000]
    slices = Slices(4, {0: 100})
    codec = SliceCodec(build({**FOUR, "rounding": "dither"}), 1, True, 0)
    for owner, (start, end) in enumerate(pairwise(cuts)):
        (own,) = slices.of(Gradient(0, flat[start:end], owner, start))
        packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
        codec.encode(own, flat[start:end], packet, GRADIENT, 3, 1)
        decoded = codec.decode(own, packet, GRADIENT, 3, 1)
        zero = (flat == 0)[start:end]
        assert (decoded[zero] == 0).all() and (end - start == 1 or decoded[~zero].norm() > 0)


@pytest.mark.parametrize("replicas", [2, 3])
def test_slices_that_touch_different_numbers_of_rows_are_gathered(replicas):
    """Their bits of rows, 128 and 129, take 16 and 32 bytes, so replicas gathered packets of different sizes:
    gloo ended the processes ("Received data size doesn't match expected size")."""
    model = nn.Linear(1000, 255 if replicas == 2 else 383, bias=False)
    block = {"replicas": {"codec": {"name": "quantize", "bits": 8}}}
    exchange, total = SimulatedReplicas(model, {"ds_compress": block}, replicas), 0
    for _ in range(replicas):
        model.weight.grad = torch.randn_like(model.weight)
        total = total + model.weight.grad
        exchange.collect()
    exchange.average()
    codec, slices = exchange.exchanges[0].codec, exchange.exchanges[0].slices
    assert len({codec.layout(each).nbytes for each in slices}) == 2
    assert (model.weight.grad - total / replicas).norm() < 0.02 * total.norm() / replicas


@pytest.mark.parametrize(
    "width, start, numel", [(96, 0, 960), (96, 40, 500), (96, 40, 30), (96, 95, 1), (9, 5, 31)]
)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_rows_of_a_run_of_values(width, start, numel, share):
    """A copy padded to whole rows, and a bool of each value, took longer than the codec."""
    rows = RowSpan.of(width, start, numel)
    values = torch.where(torch.rand(numel) < share, torch.randn(numel), 0)
    behind = rows.touched * width - rows.before - numel
    padded = torch.nn.functional.pad(values, (rows.before, behind)).view(rows.touched, width)
    assert torch.equal(rows.are_zero(values), ~padded.any(1))
    cleared, zero = values.clone(), torch.arange(rows.touched) % 2 == 0
    rows.set_to_zero(cleared, zero)
    padded[zero] = 0
    assert torch.equal(cleared, padded.view(-1)[rows.before : rows.before + numel])


@pytest.mark.parametrize("start", [0, 40])
def test_a_run_of_no_values_has_no_rows(start):
    rows, none = RowSpan.of(96, start, 0), torch.zeros(0)
    rows.set_to_zero(none, rows.are_zero(none))
    assert rows.touched == len(rows.are_zero(none)) == 0


def test_what_a_zero_row_has_left_over_is_still_sent():
    """A row that was used once keeps its residual, and the next packets send it."""
    options = ReplicasOptions(codec=FOUR, feedback="ef")
    codec = SliceCodec(build_replica_codec(options, "x"), 1, True, 0)
    own = Slice(0, 0, TensorSpec((960,), torch.float32), RowSpan(96, 0, 10))
    first, sent = torch.randn(960), torch.zeros(960)
    first[:96] *= 0.01
    for step in range(8):
        x = first if step == 0 else torch.zeros(960)
        packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
        codec.encode(own, x, packet, GRADIENT, step, 0)
        sent += codec.decode(own, packet, GRADIENT, step, 0)
    assert (sent - first).norm() < 1e-3 * first.norm()


@pytest.mark.parametrize("half", HALVES)
def test_a_damaged_packet_of_topk_is_refused_in_one_line(half):
    """It ended in an IndexError, and the error of a damaged header named "boundary 48" for a slice."""
    codec = SliceCodec(build({"name": "topk", "density": 0.01, "indices": "int32"}), 1, False, 0)
    own, x = Slice(48, 0, TensorSpec((30_000,), torch.float32)), torch.randn(30_000)
    packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
    codec.encode(own, x, packet, half, 3, 1)
    damaged = packet.clone()
    codec.layout(own).views(Packet(damaged))[0].fill_(2**30)
    place = f"gradients from replica 1, slice 48, {half}, step 3"
    with pytest.raises(CompressionError, match=f"^packet for {place}, .*topk.* cannot decode it.*damaged"):
        codec.decode(own, damaged, half, 3, 1)
    other = Slice(49, 0, own.spec)
    with pytest.raises(CompressionError, match=f"packet for slice 49, {half}, step 3, .*: its slice is 48, "):
        codec.decode(other, packet, half, 3, 1)
