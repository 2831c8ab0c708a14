"""Compiled kernels for instruction sets that the installation did not choose, and with other flags."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_compress.kernels import library, native
from tests.support.ranks import once

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
TARGETS = list(library.instruction_sets())
"""The instruction sets of this kind of machine, best first."""


def runs_here(target: str) -> bool:
    """Whether this processor has the instructions of `target`."""
    return target in library.supported()


def build_all(build_lib: Path) -> None:
    """Let setup.py make the libraries for all TARGETS; objects that are current are taken from build/."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(build_lib)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr


@cache
def built(target: str) -> ctypes.CDLL:
    """The kernels for `target`, as a wheel has them."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = once("libraries", build_all)
    return ctypes.CDLL(str(folder / library.file(target).relative_to(ROOT)))


@contextmanager
def compiled_for(target: str) -> Iterator[None]:
    """Let the kernels for `target` work on tensors of any length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: built(target))
        patch.setattr(native, "LONG", 0)
        yield


def compile_with(folder: Path, *flags: str) -> None:
    """Compile all sources with the usual and more flags, to kernels.so in `folder`."""
    sources = [path for path in library.sources() if path.suffix == ".cpp"]

    def compile_one(source: Path) -> Path:
        made = folder / f"{'-'.join(source.relative_to(library.FOLDER).parts)}.o"
        subprocess.run([COMPILER, *library.FLAGS, *flags, "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run(
        [COMPILER, *flags, "-shared", "-pthread", *objects, "-o", folder / "kernels.so"], check=True
    )


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute `function` once for equal arguments; callers must not change what it returns."""
    known: dict[tuple[Any, ...], Any] = {}

    @wraps(function)
    def once_for(x: torch.Tensor, *others: Any) -> Any:
        key = (x.dtype, x.shape, x.contiguous().view(torch.uint8).numpy().tobytes(), *others)
        if key not in known:
            known[key] = function(x, *others)
        return known[key]

    return once_for
