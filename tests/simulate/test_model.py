"""A pipeline and `simulate` of the same model give the same losses, bytes and errors, bit for bit."""

import itertools
import math

import pytest
import torch
from torch import nn

from ds_compress.config import DIRECTIONS
from ds_compress.simulate import announce, evaluating, simulate, traffic
from tests.support import pipeline, pipeline_kinds
from tests.support.pipeline import MICRO_BATCHES, alike, batches, ds_config, layers, simulated, train_step
from tests.support.pipeline_kinds import KINDS
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

TOPK = {"name": "topk", "density": 0.3}
REUSE = {"codec": {"name": "topk", "indices": "reuse"}}
FIFTH = {"name": "topk", "density": 0.2}
QUANTIZE = {"name": "quantize", "bits": 4, "group_size": 32}
EF21 = {"name": "ef21", "scope": "micro_batch", "dtype": "bf16"}
BLOCKS = {
    "topk": alike(FIFTH),
    "quantize-2": {"forward": {"codec": {**QUANTIZE, "bits": 2, "hadamard": True}}},
    "quantize-stochastic": alike({"name": "quantize", "rounding": "stochastic"}),
    **{name: alike(name) for name in ("lossless", "bf16", "fp16")},
    "minmax": alike({"name": "minmax", "bits": 4}, backward={"codec": {"name": "minmax", "bits": 8}}),
    "warmup": alike("bf16", warmup_steps=2),
    **{feedback: alike(TOPK, feedback) for feedback in ("ef", "ef21", "ef_mixed")},
    "ef-reuse": alike(TOPK, {"name": "ef", "scope": "micro_batch"}, backward={**REUSE, "feedback": "ef"}),
    "ef21-reuse-warmup": alike(TOPK, EF21, backward={**REUSE, "feedback": "ef21"}, warmup_steps=1),
    "loco": alike(QUANTIZE, "loco"),
}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.extended(keep=4)
def test_pipeline_equals_simulate(name, stages):
    block = {**BLOCKS[name], "min_numel": 0}
    real = run_ranks(stages, pipeline.train, stages, ds_config(block))
    assert real[0]["losses"] == pipeline.train_simulated(stages, ds_config(block))
    plain = {direction: {**block.get(direction, {}), "feedback": "none"} for direction in DIRECTIONS}
    has_feedback = block["forward"].get("feedback", "none") != "none"
    for other in [{}, {**block, **plain}] if has_feedback else [{}]:
        losses = pipeline.train_simulated(stages, ds_config(other))
        assert (real[0]["losses"] == losses) == (name == "lossless")


def two_layers():
    return nn.Sequential(nn.Identity(), nn.Identity())


@pytest.mark.parametrize(
    "others", [{"recipe": "auto"}, {"warmup_epochs": 1}, {"boundaries": {"9": {}}}], ids=str
)
def test_what_is_switched_off_is_the_model_itself(others):
    """It was refused for what `simulate` could not have done with it."""
    model = two_layers()
    assert simulate(model, ds_config({**others, "enabled": False}), [1]) is model


@pytest.mark.parametrize("cuts", [[0], [8], [4, 4], [5, 3], ["a"], [2.5], [True], 4, None, ["a", 3]], ids=str)
def test_cuts_must_lie_between_layers(cuts):
    """What is no integer was a TypeError."""
    eight = nn.Sequential(*(nn.Identity() for _ in range(8)))
    assert "must ascend and lie in 1..7, as integers" in refusal(simulate, eight, {}, cuts)


@pytest.mark.parametrize("steps", ["auto", "4", 0, 2.0, True], ids=str)
def test_the_number_of_micro_batches_must_be_known(steps):
    """ "auto" was a TypeError in the first training pass."""
    line = refusal(simulate, two_layers(), {"gradient_accumulation_steps": steps}, [1])
    assert f"gradient_accumulation_steps {steps!r}; allowed: an integer" in line


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": "auto"}], ids=str)
def test_the_number_of_micro_batches_follows_from_the_batch_sizes(given):
    """As in DeepSpeed; without it a step was one micro-batch long, and the warm-up too short."""
    config = ds_config({**BLOCKS["warmup"], "min_numel": 0})
    expected = pipeline.train_simulated(2, config)
    del config["gradient_accumulation_steps"]
    assert pipeline.train_simulated(2, config | given) == expected


def test_a_config_is_a_dict():
    line = refusal(simulate, two_layers(), "ds_config.json", [1])
    assert "ds_config 'ds_config.json'; allowed: the config as a dict" in line


def test_a_one_stage_pipeline_module_is_simulated_in_place():
    config = ds_config(pipeline.reusing(0.2, min_numel=0))

    def losses():
        engine, data = pipeline.build(1, config), batches()
        simulate(engine.module, config, [4])
        return [engine.train_batch(data).item() for _ in range(4)]

    assert run_ranks(1, losses)[0] == run_ranks(2, pipeline.train, 2, config)[0]["losses"]


def test_recomputed_layers_are_refused_where_there_are_boundaries():
    """DeepSpeed had counted the layers before there were boundaries: the last one was left out silently. Then
    they were refused where compression is off, too."""
    recomputing = {"pipeline": {"activation_checkpoint_interval": 1}}
    on, off = (ds_config(block, **recomputing) for block in ({}, {"enabled": False}))

    def simulate_twice():
        module = pipeline.build(1, on).module
        return simulate(module, off, [4]) is module, refusal(simulate, module, on, [4])

    ((is_left, line),) = run_ranks(1, simulate_twice)
    assert is_left
    assert "activation_checkpoint_interval 1 of the PipelineModule" in line and "allowed: 0" in line


def test_evaluation_sees_what_the_step_before_it_learned():
    block = alike({"name": "lowrank", "rank": 2}, warmup_steps=1)
    found, *_ = run_ranks(3, pipeline_kinds.train, KINDS["tensor"], block)
    expected = pipeline_kinds.train_simulated(KINDS["tensor"], block)
    assert (found["losses"], found["evaluated"]) == expected


BY_COLUMN = {"name": "aqsgd", "ids": {"column": 2}}
BLOCK = alike(FIFTH, BY_COLUMN, backward={"codec": QUANTIZE, "feedback": "ef"}, min_numel=0)
SAMPLES = 8  # of the data: every second micro-batch is of samples seen before


def with_ids():
    """Micro-batches (input, target, index): other inputs at each visit."""
    places = itertools.cycle(torch.arange(SAMPLES).split(pipeline.MICRO_BATCH))
    for (x, target), ids in zip(batches(), places):
        yield x, target, ids


def counted(stages, config, steps):
    """Losses, and by boundary and direction the bytes this rank sent."""
    engine, data = pipeline.build(stages, config), with_ids()
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    channels = [(each, each.sent) for each in engine.ds_compress.stage.sending]
    return losses, {(c.boundary.number, c.direction): (s.raw_bytes, s.wire_bytes) for c, s in channels}


def test_bytes_and_samples_are_those_of_a_pipeline():
    """The ids of samples were refused from a column; warm-up and first visits are counted."""
    config = ds_config({**BLOCK, "warmup_steps": 1})
    ranks = run_ranks(4, counted, 4, config, 4)
    model, data = simulated(layers(), config, pipeline.even_cuts(8, 4)), with_ids()
    assert [train_step(model, data) for _ in range(4)] == ranks[0][0]
    found = {(row.boundary, row.direction): (row.raw_bytes, row.wire_bytes) for row in traffic(model)}
    assert found == {place: sizes for _, sent in ranks for place, sizes in sent.items()}
    assert all(row.messages == 4 * MICRO_BATCHES for row in traffic(model))


def test_errors_are_those_of_what_arrives():
    block = {**BLOCK, "forward": {"codec": FIFTH}, "tensors": [0]}  # no parameter comes before the boundary
    model = simulate(two_layers(), ds_config(block), [1])
    assert all(math.isnan(row.relative_error) for row in traffic(model)), "nothing was sent"
    errors = []
    for seed in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        arrived = model(x)
        errors.append((x - arrived).norm().item() / x.norm().item())
        arrived.sum().backward()
    forward, backward = traffic(model)
    assert forward.relative_error == pytest.approx(sum(errors) / 3, rel=1e-6)
    assert backward.relative_error == pytest.approx(0, abs=0.2)
    model(torch.zeros(4, 64))
    forward = traffic(model)[0]
    assert forward.relative_error == pytest.approx(sum(errors) / 4, rel=1e-6), "nothing lost of zeros"
    assert forward.token_error == pytest.approx(sum(errors) / 4, rel=0.2), "rows are alike"
    model(torch.full((4, 64), torch.inf))
    assert math.isnan(traffic(model)[0].relative_error)


def test_messages_are_those_without_the_autocast_of_a_program():
    """In a run of DeepSpeed they are; in a simulated one products of codecs had 16 bits."""
    x, arrived = torch.randn(4, 64), []
    for autocast in (True, False):
        block = {**alike({"name": "lowrank", "rank": 2, "dtype": "fp32"}), "tensors": [0], "min_numel": 0}
        model = simulate(two_layers(), ds_config(block), [1])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            arrived.append(model(x))
    assert torch.equal(*arrived)


def test_epochs_are_so_many_steps():
    """`warmup_epochs` was refused; the pipeline equals `warmup_steps` (test_engine.py)."""

    def losses(block, **options):
        model = simulated(layers(), ds_config({**BLOCK, **block}), [4], **options)
        data = with_ids()
        return [train_step(model, data) for _ in range(6)]

    epochs = losses({"warmup_epochs": 2}, steps_per_epoch=2)
    assert epochs == losses({"warmup_steps": 4})
    assert epochs != losses({"warmup_steps": 3})
    assert "warmup_epochs: 2 is not allowed where the length" in refusal(losses, {"warmup_epochs": 2})


@pytest.mark.parametrize("setting", ["compressed", "uncompressed"])
def test_one_state_is_evaluated_both_ways(setting):
    def trained(**block):
        model, data = simulated(layers(), ds_config({**BLOCK, **block}), [4]), with_ids()
        return model, lambda: train_step(model, data)

    (both, step), (one, other_step) = trained(), trained(eval=setting)
    x, _ = next(batches(replica=3))
    results = {}
    for messages in ("compressed", "uncompressed"):
        assert step() == other_step()
        both[0].eval()
        with torch.no_grad(), evaluating(both, messages):
            assert not any(module.training for module in both.modules())
            results[messages] = both(x)
        assert [layer.training for layer in both] == [False] + [True] * 8
    with torch.no_grad():
        one.eval()
        assert torch.equal(one(x), results["uncompressed"]) == (setting == "uncompressed")
        with evaluating(both, "compressed"):
            assert torch.equal(both(x), one(x)) == (setting == "compressed")
    assert step() == other_step()


def test_there_are_two_ways_to_evaluate():
    line = refusal(evaluating(nn.Identity(), "on").__enter__)
    assert "messages 'on'; allowed: 'compressed', 'uncompressed'" in line


def test_samples_must_be_announced_anew():
    model = simulated(layers(), ds_config(BLOCK), [4])
    x, target, _ = batch = next(with_ids())
    announce(model, batch)
    model(x)
    for _ in range(2 * MICRO_BATCHES):
        assert "boundary 0: the samples of this training pass" in refusal(model, x)
    line = refusal(announce, model, (x, target))
    assert "aqsgd.ids.column: 2 of the data should hold integers" in line
    with torch.no_grad():
        model.eval()(x)  # needs none


@pytest.mark.parametrize("others", [{"min_numel": 4096}, {"warmup_steps": 1}, {}], ids=str)
def test_a_dimension_that_does_not_count_the_samples_is_named(others):
    """For a message that is sent uncompressed the line was of the packet: its payload had another shape."""
    block = {"forward": {"codec": "bf16", "feedback": {"name": "aqsgd", "batch_dim": 1}}, "min_numel": 0}
    model = simulated(layers(), ds_config({**block, **others}), [4])
    line = refusal(train_step, model, batches())
    assert "4 sample ids came with a message of shape [4, 8, 32], expected 8; see batch_dim" in line


def test_what_a_pipeline_warns_of_is_warned_of(caplog):
    """A collapsing run gave no warning: LoCo beside 2 bits had a backward error of 3,089."""
    backward = {"codec": {"name": "topk", "density": 0.02}}
    block = alike(QUANTIZE, backward=backward, guard={"every": 2}, warmup_steps=1, min_numel=0)
    model, data = simulated(layers(), ds_config(block), [4]), batches()
    lines = []
    with caplog.at_level("WARNING", "ds_compress"):
        for _ in range(5):
            train_step(model, data)
            lines.append([record.getMessage() for record in caplog.records])
    assert lines[1] == [], "no step of the guard"
    assert len(lines[2]) == 1 and lines[2] == lines[4], "once"
    assert lines[2][0].startswith("boundary 0, backward: topk(density=0.02) has an error of accumulated")
    assert traffic(model)[1].warnings == ("gradient_error",)
