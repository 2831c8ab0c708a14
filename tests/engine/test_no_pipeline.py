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
REQUIRE = {"DS_COMPRESS_REQUIRE": "1"}
ON_RANK_1 = {"DS_COMPRESS_REQUIRE": "rank 1"}


def plain_config(block, stage=1):
    config = ds_config(block, replicas=2)
    return {**config, "zero_optimization": {"stage": stage}} if stage else config


def config_for(kind, block):
    return plain_config(block) if kind == "plain" else ds_config(block, replicas=1 + (kind == "one stage"))


UNCOMPRESSED = [
    # kind of engine, block, environment, who asks for compression, why there is none
    ("plain", REQUIRED, {}, '"enabled": "required"', "is not a pipeline"),
    ("plain", GOOD, REQUIRE, "DS_COMPRESS_REQUIRE=1", "is not a pipeline"),
    ("plain", None, REQUIRE, "DS_COMPRESS_REQUIRE is set", 'no "ds_compress" key'),
    ("plain", {"enabled": False}, REQUIRE, "DS_COMPRESS_REQUIRE=1", '"enabled" is false'),
    ("one stage", REQUIRED, {}, '"enabled": "required"', "one stage"),
    ("one stage", GOOD, REQUIRE, "DS_COMPRESS_REQUIRE=1", "one stage"),
    ("one stage", None, REQUIRE, "DS_COMPRESS_REQUIRE is set", 'no "ds_compress" key'),
    ("pipeline", None, REQUIRE, "DS_COMPRESS_REQUIRE is set", 'no "ds_compress" key'),
    ("pipeline", {"enabled": False}, REQUIRE, "DS_COMPRESS_REQUIRE=1", '"enabled" is false'),
    ("pipeline", {"enabled": False}, ON_RANK_1, "DS_COMPRESS_REQUIRE=1", "[rank 1]"),
]
STARTS = {
    **{f"ZeRO-{stage}": ("plain", plain_config(GOOD, stage)) for stage in (0, 1, 3)},
    "bad block": ("plain", plain_config({"forward": {"codec": "nonsense"}})),
    "off": ("plain", plain_config({"enabled": False})),
    "no key": ("plain", plain_config(None)),
    "misspelt": ("plain", {**plain_config(None), "ds_compres": GOOD}),
    "misspelt in a pipeline": ("pipeline", {**ds_config(), "ds-compress": {}}),
    "one stage": ("one stage", ds_config(GOOD, replicas=2)),
    "required": ("pipeline", ds_config(REQUIRED)),
    "required by the environment": ("pipeline", ds_config(GOOD), REQUIRE),
    "not required": ("plain", plain_config(GOOD), {"DS_COMPRESS_REQUIRE": ""}),
    "required: 0": ("plain", plain_config(GOOD), {"DS_COMPRESS_REQUIRE": "0"}),
    **{
        f"uncompressed {number}": (kind, config_for(kind, block), environment)
        for number, (kind, block, environment, *_) in enumerate(UNCOMPRESSED)
    },
}


def start(kind, config, environment=None):
    """Return the lines that this rank logs, and the error that stops it."""
    lines = log_lines()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (environment or {}).items():
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
    plain_first = sorted(STARTS, key=lambda name: STARTS[name][0] != "plain")  # a pipeline leaves its groups
    return {name: start(*STARTS[name]) for name in plain_first}


@pytest.fixture(scope="module")
def starts():
    """By name, what rank 0 and rank 1 log and raise: all in one pair of processes."""
    first, other = run_ranks(2, start_all)
    return {name: (first[name], other[name]) for name in STARTS}


@pytest.mark.parametrize(
    "name, message",
    [
        *((f"ZeRO-{n}", ["has no effect", "is not a pipeline", "PipelineM"]) for n in (0, 1, 3)),
        ("misspelt", ["did you mean 'ds_compress'?"]),
        ("misspelt in a pipeline", ["ds_config key 'ds-compress' is unknown to DeepSpeed: did you mean"]),
        ("one stage", ["a pipeline of one stage"]),
    ],
)
def test_an_engine_that_compresses_nothing_says_so_once(starts, name, message):
    (lines, error), other = starts[name]
    assert error == "" and other == ([], "") and len(lines) == 1 and "\n" not in lines[0]
    assert all(part in lines[0] for part in message), lines


def test_its_block_is_checked_all_the_same(starts):
    for _, error in starts["bad block"]:
        assert error.startswith("CompressionError: ds_compress.forward.codec: 'nonsense' is not registered")


def test_switched_off_or_without_the_key_nothing_is_said(starts):
    assert starts["off"] == starts["no key"] == (([], ""), ([], ""))


@pytest.mark.parametrize("number", range(len(UNCOMPRESSED)))
def test_where_compression_is_required_every_rank_stops(starts, number):
    *_, asked, why = UNCOMPRESSED[number]
    for _, error in starts[f"uncompressed {number}"]:
        assert error.startswith("CompressionError: ds_compress") and "\n" not in error
        assert asked in error and why in error


@pytest.mark.parametrize("name", ["required", "required by the environment", "not required", "required: 0"])
def test_what_compresses_or_is_not_required_starts(starts, name):
    assert [error for _, error in starts[name]] == ["", ""]


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
