"""All ranks agree, or all stop with the same line."""

import re

import pytest
import torch

import ds_compress  # noqa: F401
from ds_compress.engine import attach as attach_module
from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from tests.support.pipeline import build, ds_config
from tests.support.ranks import run_ranks


def start(configs, timeout=None):
    if timeout:
        attach_module.HANDSHAKE_SECONDS = timeout
    try:
        build(2, configs[torch.distributed.get_rank()])
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


@pytest.mark.parametrize(
    "blocks, path, values",
    [
        (({"seed": 1}, {"seed": 2}), "ds_compress.seed", ("1", "2")),
        (
            ({"forward": {"codec": "bf16"}}, {"forward": {"codec": "fp16"}}),
            "ds_compress.forward.name",
            ("'bf16'", "'fp16'"),
        ),
        (
            ({"forward": {"codec": "topk"}}, {"forward": {"codec": {"name": "topk", "density": 0.2}}}),
            "ds_compress.forward.density",
            ("0.1", "0.2"),
        ),
        (({}, {"enabled": False}), "ds_compress.enabled", ("True", "False")),
        (
            ({}, {"boundaries": {"0": {"forward": {"codec": "bf16"}}}}),
            "ds_compress.boundaries.0",
            ("None", "bf16"),
        ),
    ],
)
def test_different_blocks(blocks, path, values):
    results = run_ranks(2, start, [ds_config(block) for block in blocks], check=False)
    for error in results:
        assert error.startswith(f"CompressionError: {path}: rank 0 has {values[0]}, rank 1 has ")
        assert values[1] in error and "\n" not in error
    assert len(set(results)) == 1


def start_without_triton_on_one(config):
    if torch.distributed.get_rank() == 1:
        with backends.using(reference):
            return start([config, config])
    return start([config, config])


def test_different_kernels():
    """The last bits of a rotation differ between Triton and torch: the states of ef21 would drift apart."""
    for error in run_ranks(2, start_without_triton_on_one, ds_config({}), check=False):
        assert error == (
            "CompressionError: ds_compress.kernels: rank 0 has 'cpu', rank 1 has 'reference'; "
            "use the same on all nodes"
        )


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.extended(keep=1)
def test_one_bad_block_stops_all(bad):
    blocks = [{"eval": "off"} if rank == bad else {} for rank in range(2)]
    results = run_ranks(2, start, [ds_config(block) for block in blocks])
    for error in results:
        assert re.fullmatch(
            rf"CompressionError: ds_compress.eval: 'off' is not allowed.* \[rank {bad}\]", error
        )


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.extended(keep=1)
def test_a_rank_without_the_key_is_named(absent):
    """A node without the package or the key trains on uncompressed; the others must not wait for ever."""
    configs = [ds_config(None if rank == absent else {}) for rank in range(2)]
    results = run_ranks(2, start, configs, 1.0, check=False)
    error = results[1 - absent]
    assert f"rank {absent} did not answer within 1 s: is ds_compress installed there" in error
