"""The Triton kernels: run here, by the interpreter or on a GPU, and compiled for GPUs that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_compress.kernels.entropy.format import frame_of
from ds_compress.kernels.quantize.grid import Grid

triton = pytest.importorskip("triton")

from ds_compress.kernels.entropy import triton as entropy  # noqa: E402
from ds_compress.kernels.quantize import triton as groups  # noqa: E402
from tests.support.triton import ARCHITECTURES, compile_launch, recorded  # noqa: E402

HERE = Path(__file__).parent


EACH_FILE = pytest.mark.parametrize("name", ["quantize", "entropy"])


def run_kernels(name, **environment):
    file = str(HERE / name / "test_triton.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(0)  # it computes all the time, and waits for nothing
@EACH_FILE
@pytest.mark.extended
def test_equal_to_the_reference_under_the_interpreter(name):
    """Every test of the files, with 8 examples where hypothesis draws them."""
    run_kernels(name, TRITON_INTERPRET="1", EXAMPLES="8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@EACH_FILE
def test_equal_to_the_reference_on_a_gpu(name):
    run_kernels(name, TRITON_INTERPRET="0", EXAMPLES="300")


WIDTHS = (4, 5)
"""One plane and two, two tiles and eight, rotated and not; slow tests take the other widths."""


def every_setting(widths):
    """Calls that between them launch every kernel and take every branch of it; `widths`: in bits."""
    for bits in widths:
        dtype = torch.bfloat16 if bits % 2 else torch.float32
        x = torch.zeros(64, 128, dtype=dtype)
        grid = Grid(bits, hadamard=bits == 4)
        groups.dequantize(groups.quantize(x, grid), grid, dtype)
        groups.quantize_with_error(x, x.float(), 1.0, grid)
    x = torch.zeros(64, 24, dtype=torch.float16)
    for bits, dither in ((1, None), (4, 2**64 - 1)):
        grid = Grid(bits)
        groups.dequantize(groups.quantize(x, grid, dither), grid, torch.float16, None, dither)
    for n, dither in ((100, None), (100_000, None), (100_000, 7)):
        frame = frame_of(n, 2.5, dithered=dither is not None)
        words = entropy.encode_entropy(torch.zeros(n), frame, dither)
        entropy.decode_entropy(words, frame, torch.float32, dither)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "architecture, widths",
    [
        (ARCHITECTURES[0], WIDTHS),
        *(pytest.param(each, range(1, 9), marks=pytest.mark.slow) for each in ARCHITECTURES),
    ],
    ids=str,
)
@pytest.mark.extended
def test_every_kernel_compiles(architecture, widths, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recorded(monkeypatch, groups, entropy) as launches:
        every_setting(widths)
    names = {kernel.fn.__name__ for kernel, _, _ in launches}
    assert names == {"_quantize", "_dequantize", "_encode", "_decode"}
    for kernel, args, named in launches:
        compiled = compile_launch(kernel, args, named, architecture)
        assert compiled.asm["cubin"]
        if kernel.fn.__name__ in ("_quantize", "_dequantize"):  # else results are not the reference's
            assert "div.full" not in compiled.asm["ptx"]
            assert not rounded_once(compiled.asm["ptx"])


def rounded_once(ptx):
    """The lines of products that are added to something in one step, but for those with 1 or -1."""
    signs = set(re.findall(r"selp\.f32\s+(%r\d+), 0f(?:BF800000, 0f3F800000|3F800000, 0fBF800000),", ptx))
    added = re.findall(r"fma\.rn\S*\s+[^,]+, ([^,]+), ([^,]+), [^;]+;", ptx)
    return [factors for factors in added if not signs & set(factors)]
