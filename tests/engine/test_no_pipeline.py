"""The key is never ignored in silence: engines without messages to compress warn, or refuse a bad block."""

import logging

import deepspeed
import pytest
import torch

import ds_compress  # noqa: F401
from tests.support.pipeline import build, ds_config, layers
from tests.support.ranks import run_ranks

GOOD = {"forward": {"codec": "bf16"}}
REQUIRED = {**GOOD, "enabled": "required"}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def start_all(cases):
    """`start` of one after the other: importing and forking takes longer than any of them."""
    return [start(*case) for case in cases]


def start(kind, config, environment=None):
    """What a rank is told: the lines of our logger, and the error that stops it."""
    handler = Lines()
    logging.getLogger("ds_compress").addHandler(handler)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (environment or {}).items():
            patched.setenv(name, value)
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
    logging.getLogger("ds_compress").removeHandler(handler)
    return handler.lines, error


def plain_config(block, stage=1):
    config = ds_config(block, replicas=2)
    return {**config, "zero_optimization": {"stage": stage}} if stage else config


def test_an_engine_without_a_pipeline_says_so_once():
    cases = [("plain", plain_config(GOOD, stage)) for stage in (0, 1, 3)]
    first, other = run_ranks(2, start_all, cases)
    assert other == [([], "")] * 3
    for lines, error in first:
        assert error == "" and len(lines) == 1 and "\n" not in lines[0]
        assert 'the "ds_compress" key has no effect' in lines[0]
        assert "DeepSpeedEngine is not a pipeline" in lines[0] and "PipelineModule" in lines[0]


def test_its_block_is_checked_all_the_same():
    for _, error in run_ranks(2, start, "plain", plain_config({"forward": {"codec": "nonsense"}})):
        assert error.startswith("CompressionError: ds_compress.forward.codec: 'nonsense' is not registered")


def test_switched_off_or_without_the_key_nothing_is_said():
    cases = [("plain", plain_config(block)) for block in ({"enabled": False}, None)]
    assert run_ranks(2, start_all, cases) == [[([], "")] * 2] * 2


def test_a_misspelt_key_is_found_without_a_pipeline_too():
    (lines, _), (others, _) = run_ranks(2, start, "plain", {**plain_config(None), "ds_compres": GOOD})
    assert len(lines) == 1 and "did you mean 'ds_compress'?" in lines[0] and others == []


def test_a_pipeline_of_one_stage_says_so():
    (lines, error), (others, _) = run_ranks(2, start, "one stage", ds_config(GOOD, replicas=2))
    assert error == "" and others == []
    assert len(lines) == 1 and "a pipeline of one stage" in lines[0]


REQUIRE = {"DS_COMPRESS_REQUIRE": "1"}


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
]


def config_for(kind, block):
    return plain_config(block) if kind == "plain" else ds_config(block, replicas=1 + (kind == "one stage"))


def test_where_compression_is_required_every_rank_stops():
    cases = [(kind, config_for(kind, block), set_to) for kind, block, set_to, *_ in UNCOMPRESSED]
    for rank in run_ranks(2, start_all, cases):
        for (_, error), (*_, asked, why) in zip(rank, UNCOMPRESSED, strict=True):
            assert error.startswith("CompressionError: ds_compress") and "\n" not in error
            assert asked in error and why in error


def test_a_pipeline_that_compresses_is_what_is_required():
    cases = [("pipeline", ds_config(block), set_to) for block, set_to in ((REQUIRED, {}), (GOOD, REQUIRE))]
    for rank in run_ranks(2, start_all, cases):
        assert [error for _, error in rank] == ["", ""]


def test_the_variable_can_be_off():
    cases = [("plain", plain_config(GOOD), {"DS_COMPRESS_REQUIRE": value}) for value in ("", "0")]
    for rank in run_ranks(2, start_all, cases):
        assert [error for _, error in rank] == ["", ""]


def test_one_rank_alone_with_the_variable_stops_all_stages():
    def start_on_one():
        here = REQUIRE if torch.distributed.get_rank() == 1 else {}
        return start("pipeline", ds_config({"enabled": False}), here)

    for _, error in run_ranks(2, start_on_one):
        assert "DS_COMPRESS_REQUIRE=1" in error and error.endswith("[rank 1]")
