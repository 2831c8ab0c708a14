"""Drive compiled kernels with hostile packets and awkward sizes under AddressSanitizer."""

import ctypes
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.codecs.entropy import Entropy
from ds_compress.codecs.quantize import Quantize
from ds_compress.errors import CompressionError
from ds_compress.kernels import library, native
from ds_compress.kernels.backends import cpu
from ds_compress.kernels.entropy.format import frame_of
from ds_compress.kernels.feedback.reference import GROUP
from tests.message.test_fuzz import fuzz
from tests.support.kernels import compile_with
from tests.support.ranks import once

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-O0", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def runtime() -> str:
    """What is loaded first: libasan of g++, and the C++ library, whose exceptions it watches."""
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [shutil.which("g++") or pytest.skip("no g++"), f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        paths.append(found if "/" in found else pytest.skip(f"no {name} beside g++"))
    return " ".join(paths)


def sanitized(*arguments):
    preloaded = runtime()
    folder = once("sanitized", lambda folder: compile_with(folder, *SANITIZERS))
    environment = {
        **os.environ,
        "SANITIZED": str(folder / "kernels.so"),
        "LD_PRELOAD": preloaded,
        # Python keeps what it has until it ends; a report names libraries, not lines
        "ASAN_OPTIONS": "detect_leaks=0:symbolize=0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.test_sanitizer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.extended
def test_hostile_packets_and_awkward_sizes():
    done = sanitized()
    assert done.returncode == 0, done.stderr[-6000:]
    found = re.fullmatch(r"(\d+) messages, (\d+) refused, (\d+) decoded\n", done.stdout)
    count, refused, decoded = map(int, found.groups())
    assert count > 1000 and refused > 300 and decoded > 100


@pytest.mark.extended
def test_the_sanitizer_sees_an_overflow():
    """The suite would notice: a buffer that is too small ends the process."""
    done = sanitized("overflow")
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "kernels.so" in done.stderr


SHAPES = [(0,), (1,), (7,), (8,), (63,), (64,), (65,), (3, 129), (2, 24, 40), (1, 8192 + 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CODECS = [
    *(
        {"name": "quantize", "bits": bits, "group_size": size, "hadamard": size in (8, 64, 4096)}
        for bits, size in itertools.product(range(1, 9), (8, 24, 64, 128, 4096))
    ),
    *({"name": "quantize", "rounding": "stochastic", "group_size": size} for size in (8, 24, 4096)),
    *({"name": "minmax", "bits": bits} for bits in range(1, 9)),
    *({"name": "fp8", "format": name, "group_size": 24} for name in ("e4m3", "e5m2")),
    {"name": "fp8"},
    *({"name": "topk", "indices": coder, "density": 0.3} for coder in ("bitmask", "int16", "int32", "rice")),
    *({"name": "entropy", "bits": bits} for bits in (0.1, 1, 2.5, 6)),
    *({"name": "entropy", "bits": bits, "rounding": "dither"} for bits in (2.5, 6)),
    {"name": "entropy", "bits": 6, "rank": 8},
]


def messages() -> int:
    """Encodes, decodes, and decodes noise, for every two of codec, shape and dtype; how many times."""
    count = 0
    for (number, choice), (place, shape) in itertools.product(enumerate(CODECS), enumerate(SHAPES)):
        dtype = DTYPES[(number + place) % len(DTYPES)]
        codec, x = build(choice), torch.randn(shape).to(dtype)
        x.view(-1)[::5] = [0, torch.inf, torch.nan, 1e-40, 1][count % 5]
        if isinstance(codec, Entropy):
            codec = codec.paired_with(build("none"))
        ctx = Context(stash={"activation": torch.randn(shape).to(dtype)})
        parts = codec.encode(x, ctx)
        codec.decode(parts, TensorSpec.of(x), ctx)
        residual = torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32))
        if isinstance(codec, Quantize):
            coded = torch.zeros_like(x, dtype=torch.int8), torch.zeros(-(-x.numel() // GROUP))
            plain = residual, residual.bfloat16()
            for state in ((plain[0],), (plain[1],), coded):
                codec.encode_with_residual(x, state, 0.5, 0.5, Context())
            for held in plain:
                codec.encode_change(x, held, Context())
                codec.decode_change(parts, held, TensorSpec.of(x), Context())
        noise = (torch.randint(0, 256, (part.nbytes,), dtype=torch.uint8) for part in parts)
        noise = tuple(each.view(part.dtype).view(part.shape) for each, part in zip(noise, parts))
        try:
            codec.decode(noise, TensorSpec.of(x), ctx)
        except (CompressionError, IndexError, RuntimeError) as error:  # an index that is none of the tensor's
            assert any(word in str(error).lower() for word in ("index", "repeat", "damaged code")), error
        count += 1
    return count


def damaged_codes() -> int:
    """Entropy codes of all lanes and several blocks, with some words replaced; how many."""
    count = 0
    kinds = itertools.product((1, 2.5, 6), (torch.float32, torch.bfloat16), (0.0, 1.0))
    for bits, dtype, tail in kinds:
        x = (torch.randn(70_011) * torch.exp2(8 * tail * torch.randn(70_011))).to(dtype)
        frame = frame_of(70_011, bits)
        code, _ = cpu.encode_entropy(x, frame)
        assert cpu.decode_entropy(code, frame, dtype)[1]
        spans = frame.head, frame.tables + 4, frame.tables + 300, len(code)  # states; step; table; anything
        for span in spans * 8:
            damaged, words = code.clone(), torch.randint(-(2**15), 2**15, (3,))
            damaged[torch.randint(max(0, span - 300), span, (3,))] = words.short()
            cpu.decode_entropy(damaged, frame, dtype)
            count += 1
    return count


def overflow() -> None:
    """What the declarations are for: a buffer one byte too small."""
    found = torch.zeros(16, dtype=torch.int64)[:15].clone()
    packed = torch.full((2,), 255, dtype=torch.uint8)
    kernels.list_bits(struct.pack("QqQq", packed.data_ptr(), 16, found.data_ptr(), 16), 1)


if __name__ == "__main__":
    kernels = ctypes.CDLL(os.environ["SANITIZED"])
    library.load = lambda: kernels
    native.LONG = 0
    torch.manual_seed(0)
    if "overflow" in sys.argv:
        overflow()
    refused, decoded = fuzz(1000, seed=0)
    print(f"{messages() + damaged_codes()} messages, {refused} refused, {decoded} decoded", flush=True)
