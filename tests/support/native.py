"""The C++ sources, compiled for processors of which this one may be another kind."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_compress.kernels import native
from ds_compress.kernels.native import build
from tests.support.shared import once

SOURCES = (
    *("quantize", "quantize_feedback", "selection", "kth_largest", "gather_scatter"),
    *("fp8", "fixed_point", "entropy", "feedback", "byte_shuffle"),
)

TARGETS = {"x86-64": "x86_64", "x86-64-v3": "x86_64", "x86-64-v4": "x86_64", "armv8-a": "aarch64"}
"""Words of -march, and the machines that they are for: x86 without AVX, with AVX2, with AVX-512; ARM."""

_AVX2 = {"avx2", "fma", "bmi2", "f16c", "movbe", "abm"}
_NEEDED = {
    "x86-64": set(),
    "x86-64-v3": _AVX2,
    "x86-64-v4": _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "armv8-a": set(),
}


def compiler_for(target: str) -> str:
    """A g++ that compiles for `target`; where there is none the test is skipped."""
    machine = TARGETS.get(target, platform.machine())
    name = "g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
    return shutil.which(name) or pytest.skip(f"no {name}")


def runs_here(target: str) -> bool:
    """Whether this processor has the instructions of `target`."""
    if TARGETS[target] != platform.machine():
        return False
    return _NEEDED[target] <= set(Path("/proc/cpuinfo").read_text().split())


@cache
def built(source: str, target: str) -> Path:
    """`source`, compiled for `target` without a warning."""
    compiler = compiler_for(target)

    def compile_into(folder: Path) -> None:
        words = build.command(compiler, source, folder / "made.so", target)
        done = subprocess.run([*words, "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return once(f"{source}.{target}", compile_into) / "made.so"


@contextmanager
def compiled_for(target: str) -> Iterator[None]:
    """Every compiled pass is that of `target`, and taken however short the tensor is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda source: ctypes.CDLL(str(built(source, target))))
        patch.setattr(native, "LONG", 0)
        yield


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a tensor and of what can be hashed, computed once for equal arguments: what plain torch
    makes of them is compared with what each target does. Nobody may change what it returns."""
    known: dict[tuple[Any, ...], Any] = {}

    @wraps(function)
    def once_for(x: torch.Tensor, *others: Any) -> Any:
        key = (x.dtype, x.shape, x.contiguous().view(torch.uint8).numpy().tobytes(), *others)
        if key not in known:
            known[key] = function(x, *others)
        return known[key]

    return once_for
