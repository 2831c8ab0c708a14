"""The C++ sources compile without a warning and give the same bits for every instruction set."""

import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress import config  # noqa: F401  (registers the codecs)
from ds_compress.kernels import library
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import any_grid, assert_same_bits
from tests.support.kernels import EACH_TARGET, TARGETS, compiled_for
from tests.support.messages import values

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


FOREIGN = {"aarch64": "aarch64-linux-gnu-g++"}
"""Machines that this one may have a compiler for."""


@pytest.mark.parametrize("target", [*TARGETS, *FOREIGN])
@pytest.mark.parametrize(
    "source", [path for path in library.sources() if path.suffix == ".cpp"], ids=lambda path: path.stem
)
@pytest.mark.extended
def test_every_source_compiles_without_a_warning(source, target, tmp_path):
    """Version 0.1 passed vectors of 16 floats by value: a warning, and an error here, without AVX-512."""
    compiler = shutil.which(FOREIGN.get(target, "g++")) or pytest.skip("no such compiler")
    march = [f"-march={target}"] if target.startswith("x86-64") else []
    words = [compiler, *library.FLAGS, "-O0", *march, "-Werror", "-c", source, "-o", tmp_path / "made.o"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@EACH_TARGET
@settings(max_examples=80, deadline=None, database=None)
@given(
    bits=st.integers(1, 8),
    size=st.sampled_from([8, 16, 24, 32, 40, 64, 128, 256, 1024, 4096]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    hadamard=st.booleans(),
    n=st.integers(1, 300),
    special=st.sampled_from([None, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 1000),
    dither=st.integers(0, 2**64 - 1),
)
def test_quantization_has_the_same_bits_on_every_processor(
    target, bits, size, dtype, hadamard, n, special, seed, dither
):
    grid = any_grid(bits, hadamard, size, seed)
    x = values(n, size, dtype, seed, special)
    expected = reference.quantize(x, grid)
    with compiled_for(target):
        assert_same_bits(cpu.quantize(x, grid), expected)
        parts = reference.quantize(x, grid, dither)
        assert_same_bits(cpu.quantize(x, grid, dither), parts)
        for out in (torch.float32, torch.bfloat16):
            for sent, key in ((parts, dither), (expected, None)):
                decoded = cpu.dequantize(sent, grid, out, None, key)
                assert_same_bits([decoded], [reference.dequantize(sent, grid, out, None, key)])


@EACH_TARGET
def test_messages_beyond_the_caches_have_the_same_bits(target):
    """What they decode to goes past the caches, if it is aligned."""
    grid = Grid(bits=4)
    x = values(40_000, 128, torch.float32, 0)
    parts = reference.quantize(x, grid)
    with compiled_for(target):
        for out in (torch.float32, torch.bfloat16):
            for dither in (None, 77):
                decoded = cpu.dequantize(parts, grid, out, None, dither)
                assert_same_bits([decoded], [reference.dequantize(parts, grid, out, None, dither)])


def test_groups_of_subnormal_numbers_have_steps_with_an_inverse():
    """Codes are made by a product with 1 / step, which is infinite for the smallest numbers."""
    x = torch.linspace(-1, 1, 256).mul(3e-39).view(2, 128)
    zeros = torch.zeros(1, 128)
    for grid in (Grid(1), Grid(4), Grid(8)):
        parts = reference.quantize(x, grid)
        assert (reference.dequantize(parts, grid) - x).abs().max() <= 2.0**-126
        assert_same_bits(cpu.quantize(x, grid), parts)
        assert not reference.dequantize(reference.quantize(zeros, grid), grid).any()
