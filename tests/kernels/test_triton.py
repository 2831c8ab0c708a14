"""The Triton kernels: run here, by the interpreter or on a GPU, and compiled for GPUs that are not here."""

import contextlib
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


WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.timeout(0)  # it computes all the time, and waits for nothing
@pytest.mark.parametrize("name", ["quantize", "entropy"])
@pytest.mark.parametrize(
    "interpreted, examples",
    [pytest.param("1", "8", marks=pytest.mark.extended), pytest.param("0", "300", marks=WITHOUT_GPU)],
    ids=["interpreter", "GPU"],
)
def test_equal_to_the_reference(name, interpreted, examples):
    """Every test of the files, with so many examples where hypothesis draws them."""
    file = str(HERE / name / "test_triton.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "EXAMPLES": examples}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


WIDTHS = (4, 5)
"""One plane and two, two tiles and eight, rotated and not; slow tests take the other widths."""


def every_setting(widths):
    """Calls that between them launch every kernel and take every branch of it; `widths`: in bits."""
    for bits in widths:
        dtype = torch.bfloat16 if bits % 2 else torch.float32
        x = torch.zeros(64, 128, dtype=dtype)
        grid = Grid(bits, hadamard=bits == 4)
        groups.dequantize(groups.quantize(x, grid), grid, dtype)
    x = torch.zeros(64, 24, dtype=torch.float16)
    for bits, dither in ((1, None), (4, 2**64 - 1)):
        grid = Grid(bits)
        groups.dequantize(groups.quantize(x, grid, dither), grid, torch.float16, None, dither)
    for n, dither in ((100, None), (100_000, None), (100_000, 7)):
        frame = frame_of(n, 2.5, dithered=dither is not None)
        words, _ = entropy.encode_entropy(torch.zeros(n), frame, dither)
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


DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
WARPS = 4  # of a program, by default

LIMITS = {  # at most, for a value: encoding and decoding groups of 128, for sm_90; behind them what it is
    "8 bits": (Grid(8), torch.float32, 13, 6.5),  # 12.5, 5.9
    "4 bits": (Grid(4), torch.float32, 13, 7.5),  # 12.6, 6.9
    "4 bits, bf16": (Grid(4), torch.bfloat16, 14.5, 8),  # 13.9, 7.2
    "2 bits": (Grid(2), torch.float32, 13, 7.5),  # 12.6, 7.0
    "4 bits, rotated": (Grid(4, hadamard=True), torch.float32, 23.5, 18.5),  # 22.8, 17.8
    "4 bits, rotated, bf16": (Grid(4, hadamard=True), torch.bfloat16, 25, 19),  # 24.4, 18.0
}


def instructions(launch, folder):
    """For a value of a launch, on the way that values take which are no special case."""
    kernel, args, named = launch
    file = folder / "kernel.cubin"
    file.write_bytes(compile_launch(kernel, args, named, 90).asm["cubin"])
    text = subprocess.run([DISASSEMBLER, "-c", file], capture_output=True, text=True, check=True).stdout
    count, target = 0, None
    for label, line in re.findall(r"^(\.L\w+):$|^\s+/\*[0-9a-f]{4,}\*/\s+(.*)$", text, re.M):
        target = None if label == target else target
        if line and target is None:
            count += 1
            over = re.match(r"@!?U?P\d BRA `\((\.L\w+)\)", line)  # branches lead over special cases
            target = over and over[1]
        if line.startswith("EXIT"):
            break
    threads = 32 * named.get("num_warps", WARPS)
    return count * threads / (named["ROWS"] * named["TILES"] * named["WIDTH"])


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton came without nvdisasm")
@pytest.mark.parametrize("grid, dtype, most_to_encode, most_to_decode", LIMITS.values(), ids=LIMITS)
@pytest.mark.extended
def test_few_instructions_stand_between_a_load_and_a_store(
    grid, dtype, most_to_encode, most_to_decode, monkeypatch, tmp_path
):
    """A kernel is limited by memory if few instructions stand between a load and a store; no GPU is needed to
    count them. Version 0.1 divided every value by its step (about ten instructions), and its butterflies took
    six where a shuffle and a sum take two."""
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    with recorded(monkeypatch, groups) as launches:
        parts = groups.quantize(torch.zeros(4096, 128, dtype=dtype), grid)
        groups.dequantize(parts, grid, dtype)
    encode, decode = (instructions(launch, tmp_path) for launch in launches)
    assert 1 < encode <= most_to_encode and 1 < decode <= most_to_decode
