"""The key is never ignored in silence: engines that compress nothing warn, and accelerate's compress."""

import logging

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule

from tests.support.pipeline import batches, build, ds_config, layers, log_lines, loss_fn, train
from tests.support.ranks import run_ranks

GOOD = {"forward": {"codec": "bf16"}}
REQUIRED = {**GOOD, "enabled": "required"}
KINDS = {"plain": "is not a pipeline", "one stage": "one stage", "pipeline": ""}
"""Of engines, and why none of a kind compresses."""


def plain_config(block, stage=1):
    config = ds_config(block, replicas=2)
    return {**config, "zero_optimization": {"stage": stage}} if stage else config


NO_PIPELINE = ("has no effect", "is not a pipeline", "PipelineM")
REQUIRE, OFF = {"DS_COMPRESS_REQUIRE": "1"}, {"enabled": False}
NOWHERE = {"warmup_epochs": 1, "boundaries": {"9": GOOD}, "recipe": "safe_replicas"}
"""What no pipeline here could have."""
BY_BLOCK, BY_ENVIRONMENT = '"enabled": "required"', "DS_COMPRESS_REQUIRE=1"
GO_ON = [
    # kind of engine, config or block, environment, what rank 0 logs
    *(("plain", plain_config(GOOD, stage), {}, NO_PIPELINE) for stage in (0, 1, 3)),
    *(("plain", GOOD, {"DS_COMPRESS_REQUIRE": no}, NO_PIPELINE) for no in ("", "0")),
    ("one stage", GOOD, {}, ("a pipeline of one stage",)),
    ("plain", {**plain_config(None), "ds_compres": GOOD}, {}, ("did you mean 'ds_compress'?",)),
    ("pipeline", {**ds_config(), "ds-compress": {}}, {}, ("key 'ds-compress' is unknown to DeepSpeed: did",)),
    *(("plain", block, {}, ()) for block in (None, OFF)),
    ("pipeline", {**OFF, **NOWHERE}, {}, ()),
    ("pipeline", REQUIRED, {}, ()),
    ("pipeline", GOOD, REQUIRE, ()),
]
STOP = [
    # the same, but what every rank raises
    ("plain", {"forward": {"codec": "nonsense"}}, {}, (".forward.codec: 'nonsense' is not registered",)),
    *((kind, None, REQUIRE, ("_REQUIRE is set", 'no "ds_compress" key')) for kind in KINDS),
    *((kind, OFF, REQUIRE, (BY_ENVIRONMENT, '"enabled" is false')) for kind in ("plain", "pipeline")),
    *((kind, REQUIRED, {}, (BY_BLOCK, why)) for kind, why in KINDS.items() if why),
    *((kind, GOOD, REQUIRE, (BY_ENVIRONMENT, why)) for kind, why in KINDS.items() if why),
    ("pipeline", OFF, {"DS_COMPRESS_REQUIRE": "rank 1"}, (BY_ENVIRONMENT, "[rank 1]")),
]
STARTS = [*GO_ON, *STOP]


def start(kind, config, environment, _):
    """Return the lines that this rank logs, and the error that stops it."""
    if "optimizer" not in (config or {}):  # a block
        replicas = 1 + (kind == "one stage")
        config = plain_config(config) if kind == "plain" else ds_config(config, replicas=replicas)
    lines = log_lines()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            if value != "rank 1":
                patched.setenv(name, value)
            elif torch.distributed.get_rank() == 1:
                patched.setenv(name, "1")
        try:
            if kind == "pipeline":
                build(torch.distributed.get_world_size(), config)
            elif kind == "one stage":
                build(1, config, specs=layers(2))
            else:
                model = torch.nn.Linear(4, 4)
                deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
            error = ""
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    return [line for line in lines if "key" in line or "ds_compress" in line], error


def start_all():
    logging.getLogger("ds_compress").setLevel(logging.WARNING)
    plain_first = sorted(range(len(STARTS)), key=lambda number: STARTS[number][0] != "plain")
    return {number: start(*STARTS[number]) for number in plain_first}  # a pipeline leaves its groups


@pytest.fixture(scope="module")
def starts():
    """By number, what ranks log and raise: all in one pair of processes."""
    return run_ranks(2, start_all)


@pytest.mark.parametrize("number", range(len(GO_ON)))
def test_an_engine_that_compresses_nothing_says_so_once(starts, number):
    """Not where it is switched off, or has no key. Switched off it was refused for options that do not fit
    the pipeline, such as warm-up epochs without training data."""
    ((lines, error), other), parts = (rank[number] for rank in starts), GO_ON[number][-1]
    assert error == "" and other == ([], "") and len(lines) == bool(parts)
    assert all(part in lines[0] and "\n" not in lines[0] for part in parts), lines


@pytest.mark.parametrize("number", range(len(STOP)))
def test_where_compression_is_required_every_rank_stops(starts, number):
    """With a bad block too: it is checked all the same."""
    for _, error in (rank[len(GO_ON) + number] for rank in starts):
        assert error.startswith("CompressionError: ds_compress") and "\n" not in error
        assert all(part in error for part in STOP[number][-1]), error


BLOCK = {"forward": {"codec": {"name": "quantize", "bits": 4}}, "backward": {"codec": "bf16"}, "min_numel": 1}
STEPS = 3


def prepared(model, config):
    """What `accelerate launch --use_deepspeed` has a script do, with the plugin from a DeepSpeed config."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        plugin = DeepSpeedPlugin(hf_ds_config={**config, "zero_optimization": {"stage": 0}})
        return Accelerator(deepspeed_plugin=plugin).prepare(model)


def pipeline(config):
    torch.manual_seed(1)
    options = {"loss_fn": loss_fn, "partition_method": "uniform", "seed_layers": True}
    engine = prepared(PipelineModule(layers(), num_stages=2, **options), config)
    data = batches()
    return [engine.train_batch(data).item() for _ in range(STEPS)]


@pytest.mark.extended
def test_a_pipeline_is_compressed_as_without_accelerate():
    config = ds_config(BLOCK)
    expected = [found["losses"] for found in run_ranks(2, train, 2, config, STEPS)]
    assert run_ranks(2, pipeline, config) == expected
    assert run_ranks(2, pipeline, {**config, "train_batch_size": "auto"}) == expected
    del config["train_batch_size"]
    assert run_ranks(2, pipeline, config) == expected
    assert expected != [found["losses"] for found in run_ranks(2, train, 2, ds_config(), STEPS)]


def plain(config):
    lines = log_lines()
    engine = prepared(torch.nn.Linear(4, 4), config)
    return type(engine).__name__, lines


def test_of_another_model_it_is_said_that_nothing_is_compressed():
    (first, lines), other = run_ranks(2, plain, ds_config(BLOCK, replicas=2))
    assert first == "DeepSpeedEngine" and other == (first, [])
    assert len(lines) == 1 and 'the "ds_compress" key has no effect' in lines[0]
    assert "DeepSpeedEngine is not a pipeline" in lines[0]
