"""A pair of small layers at each cut: what crosses is narrow, and all else is as without."""

import itertools
from functools import partial

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_compress
from ds_compress.engine.subspace import SubspacePipeline, find_bases, insert_pairs
from ds_compress.errors import CompressionError
from ds_compress.simulate import simulate
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    WIDTH,
    Block,
    batches,
    build,
    ds_config,
    evaluate,
    train_step,
)
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
RANK, LENGTH = 4, 8
CODEC = {"name": "quantize", "bits": 8, "group_size": 32}
BLOCK = {"forward": {"codec": CODEC}, "backward": {"codec": CODEC}, "min_numel": 0}
HEADER, ALIGNMENT = 32, 16  # of packets


def modules(count=4):
    """The same in every process."""
    torch.manual_seed(7)
    return [Block() for _ in range(count)]


def samples(count=4):
    return [x for x, _ in itertools.islice(batches(replica=9), count)]


def one_process(layers, cuts, config, rank=RANK):
    """The pipeline with pairs, simulated."""
    found, inside = insert_pairs(layers, cuts, find_bases(layers, cuts, samples(), rank, CPU))
    built = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in found]
    return simulate(nn.Sequential(*built), config, inside)


def narrow(layers, stages, config, rank=RANK, **options):
    module_class = partial(SubspacePipeline, rank=rank, samples=samples())
    return build(stages, config, layers, module_class=module_class, seed_layers=False, **options)


@pytest.mark.parametrize("kind", [nn.Identity, None], ids=["tensor", "tuple"])
def test_a_basis_of_full_rank_changes_nothing(kind):
    layers = modules()
    model = one_process(layers, [1, 3], ds_config({"forward": {"codec": "none"}}), rank=WIDTH)
    x = samples()[0]
    expected = nn.Sequential(*layers)(x)
    if kind is None:  # what travels beside a hidden state passes by
        narrowed, widened = model[1], model[3]
        coefficients, mask = narrowed((x, x > 0))
        assert mask is widened((coefficients, mask))[1]
        torch.testing.assert_close(widened((coefficients, mask))[0], x)
    torch.testing.assert_close(model(x), expected)


def test_a_basis_is_the_best_of_its_rank():
    layers = modules()
    (basis,) = find_bases(layers, [2], samples(), RANK, CPU)
    with torch.no_grad():
        rows = torch.cat([nn.Sequential(*layers[:2])(x).flatten(0, 1) for x in samples()])
    torch.testing.assert_close(basis.mean, rows.mean(0))
    torch.testing.assert_close(basis.directions @ basis.directions.T, torch.eye(RANK), atol=1e-5, rtol=0)
    centred = rows - rows.mean(0)
    lost = (centred - centred @ basis.directions.T @ basis.directions).norm()
    torch.testing.assert_close(lost, torch.linalg.svdvals(centred)[RANK:].norm())


def test_looking_for_a_basis_leaves_no_trace():
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), LayerSpec(Block), torch.tanh, Block()]
    layers[4].eval()
    modes = [layer.training for layer in layers if isinstance(layer, nn.Module)]
    before = torch.get_rng_state()
    first, again = (find_bases(layers, [2, 4], samples(), RANK, CPU) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [layer.training for layer in layers if isinstance(layer, nn.Module)]
    assert all(torch.equal(x, y) for one, two in zip(first, again) for x, y in zip(one, two))


def trained(stages, steps=3, **changes):
    """Losses, bytes handed to the transport, shapes of this rank's parameters, and where stages begin."""
    engine = narrow(modules(), stages, ds_config(BLOCK, **changes))
    data = batches()
    losses = [engine.eval_batch(data).item()]
    before = [
        (channel.sent.raw_bytes, channel.sent.wire_bytes) for channel in engine.ds_compress.stage.sending
    ]
    losses += [engine.train_batch(data).item() for _ in range(steps)]
    sent = [
        (channel.sent.raw_bytes - raw, channel.sent.wire_bytes - wire)
        for channel, (raw, wire) in zip(engine.ds_compress.stage.sending, before)
    ]
    return losses, sent, [tuple(p.shape) for p in engine.module.parameters()], list(engine.module.parts)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_sends_coefficients_and_trains_as_one_process_does(stages):
    ranks = run_ranks(stages, trained, stages)
    cuts = [4 * stage // stages for stage in range(1, stages)]
    model = one_process(modules(), cuts, ds_config(BLOCK))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches()
    expected = [evaluate(model, data)] + [train_step(model, optimizer, data) for _ in range(3)]
    values = MICRO_BATCH * LENGTH * RANK
    for losses, sent, _, parts in ranks:
        assert losses == expected
        for raw, wire in sent:
            assert raw == 3 * MICRO_BATCHES * 4 * values
            assert wire == 3 * MICRO_BATCHES * (HEADER + values + 2 * ALIGNMENT)  # two numbers a group
        assert parts == [0, *(cut + 2 * number + 1 for number, cut in enumerate(cuts)), 4 + 2 * len(cuts)]
    assert (RANK, WIDTH) in ranks[0][2] and (WIDTH, RANK) in ranks[-1][2]
    assert expected[-1] < expected[1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_change_nothing(reentrant):
    pipeline = {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}
    plain, again = (run_ranks(2, partial(trained, pipeline=options), 2) for options in ({}, pipeline))
    assert [losses for losses, *_ in again] == [losses for losses, *_ in plain]


def saved_and_resumed(folder):
    engine, data = narrow(modules(), 2, ds_config(BLOCK)), batches()
    engine.train_batch(data)
    engine.save_checkpoint(str(folder))
    whole = [engine.train_batch(data).item() for _ in range(2)]
    torch.manual_seed(11)
    other = [Block() for _ in range(4)]
    engine, data = narrow(other, 2, ds_config(BLOCK)), batches()
    engine.load_checkpoint(str(folder))
    data = itertools.islice(data, MICRO_BATCHES, None)
    return whole, [engine.train_batch(data).item() for _ in range(2)]


def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path):
    for whole, resumed in run_ranks(2, saved_and_resumed, tmp_path):
        assert resumed == whole


def uneven():
    torch.manual_seed(7)
    return [Block(), *(nn.Linear(WIDTH, WIDTH) for _ in range(5))]


def replicated(_):
    """On two replicas of two stages, cut by parameters: where, without pairs and with; what came of it."""
    config = ds_config(BLOCK, replicas=2)
    plain = build(2, config, uneven(), seed_layers=False, partition_method="parameters")
    engine = narrow(uneven(), 2, config, partition_method="parameters")
    data = batches(engine.grid.get_data_parallel_id())
    losses = [engine.train_batch(data).item() for _ in range(3)]
    found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return list(plain.module.parts), list(engine.module.parts), engine.stage_id, found, losses


def test_replicas_stay_alike_and_cuts_are_those_of_deepspeed():
    ranks = run_ranks(4, replicated, None)
    for plain, parts, stage, weights, losses in ranks:
        assert plain[1] != 3 and parts == [0, plain[1] + 1, 8]
        assert losses == ranks[0][4] and losses[-1] < losses[0]
        other = next(found for _, _, of, found, _ in ranks if of == stage)
        assert all(torch.equal(weight, other[name]) for name, weight in weights.items())


def tied(rank):
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    layers = [ends[0], *modules(2), ends[1]]
    module_class = partial(SubspacePipeline, rank=rank, samples=samples())
    engine = build(2, ds_config(BLOCK), layers, module_class=module_class)
    losses = [engine.train_batch(batches()).item() for _ in range(2)]
    return losses, engine.module.tied_modules["ends"].weight.detach().clone()


def test_tied_layers_stay_tied():
    first, last = run_ranks(2, tied, RANK)
    assert first[0] == last[0]
    assert torch.equal(first[1], last[1])


def without_pairs(rank):
    return narrow(modules(), 2, ds_config(BLOCK), rank=rank).module.state_dict()


def test_no_rank_is_no_pairs():
    names = [name for state in run_ranks(2, without_pairs, None) for name in state]
    torch.manual_seed(1)
    assert sorted(names) == sorted(nn.Sequential(*modules()).state_dict())


class Ids(nn.Module):
    def forward(self, x):
        return (x[..., 0] * 100).long()


class Infinite(nn.Module):
    def forward(self, x):
        return x / 0


REFUSED = {
    "no samples": ({"samples": []}, "subspace: samples: none are given"),
    "too wide": (
        {"rank": 33},
        "the cut after layer 1: rank 33; hidden states are 32 wide there: should be 1..32",
    ),
    "none": ({"rank": 0}, "rank 0; hidden states are 32 wide there: should be 1..32"),
    "ids": ({"second": Ids()}, r"a torch.int64 tensor of shape \[4, 8\] passes it first"),
    "inf": ({"second": Infinite()}, "hidden states of the samples hold inf or nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_basis_is_found_for_is_refused(name):
    changes, message = REFUSED[name]
    given = {"samples": samples(), "rank": RANK, "second": Block(), **changes}
    with pytest.raises(CompressionError, match=message):
        find_bases([Block(), given["second"], Block()], [2], given["samples"], given["rank"], CPU)


def refused(rank):
    layers = modules()
    layers[0] = nn.Linear(3, 3)  # does not fit the samples
    found = []
    for options in ({"rank": 33}, {"rank": RANK}):
        try:
            narrow(modules() if options["rank"] == 33 else layers, 2, ds_config(BLOCK), **options)
        except CompressionError as error:
            found.append(str(error))
    return found


def test_all_ranks_refuse_what_the_first_one_does():
    first, second = run_ranks(2, refused, None)
    assert "rank 33; hidden states are 32 wide" in first[0] and "rank 0 found no basis" in second[0]
    assert "RuntimeError" in first[1] and "rank 0 found no basis" in second[1]


def parallel(_):
    with pytest.raises(CompressionError, match="subspace: tensor-parallel layers are not supported"):
        narrow(modules(), 2, ds_config(BLOCK), tensor_parallel=2)


def test_tensor_parallel_layers_are_refused():
    run_ranks(4, parallel, None)


def test_the_public_name_is_the_class():
    assert ds_compress.SubspacePipeline is SubspacePipeline
    assert issubclass(SubspacePipeline, PipelineModule)
