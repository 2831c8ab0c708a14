"""Count the instructions that GPU kernels compile to; no GPU is needed.

A kernel is limited by memory if few instructions stand between a load and a store. Version 0.1 divided every
value by its step (about ten instructions), and its butterflies took six where a shuffle and a sum take two.
"""

import contextlib
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from ds_compress.kernels.quantize import triton as groups  # noqa: E402
from ds_compress.kernels.quantize.grid import Grid  # noqa: E402
from tests.support.triton import compile_launch, recorded  # noqa: E402

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
WARPS = 4  # of a program, where nothing else is said

pytestmark = pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton came without nvdisasm")

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


@pytest.mark.parametrize("grid, dtype, most_to_encode, most_to_decode", LIMITS.values(), ids=LIMITS)
@pytest.mark.extended
def test_few_instructions_stand_between_a_load_and_a_store(
    grid, dtype, most_to_encode, most_to_decode, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    with recorded(monkeypatch, groups) as launches:
        parts = groups.quantize(torch.zeros(4096, 128, dtype=dtype), grid)
        groups.dequantize(parts, grid, dtype)
    encode, decode = (instructions(launch, tmp_path) for launch in launches)
    assert 1 < encode <= most_to_encode and 1 < decode <= most_to_decode
