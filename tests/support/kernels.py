"""Compiled kernels for instruction sets that the installation did not choose, and with other flags."""

import ctypes
import os
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
from hypothesis import strategies as st

from ds_compress.kernels import library, native
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.feedback.reference import encode_int8
from tests.support.codecs import assert_same_bits
from tests.support.ranks import once

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
TARGETS = list(library.instruction_sets())
"""The instruction sets of this kind of machine, best first."""
_SUPPORTED = [name for name in TARGETS if name in library.supported()]
EACH_TARGET = pytest.mark.parametrize(
    "target", _SUPPORTED[:1] + [pytest.param(name, marks=pytest.mark.extended) for name in _SUPPORTED[1:]]
)
"""Those that this processor has; `make test` has the best one, which is installed: others take a minute."""
GROUPS = {
    "bits": st.integers(1, 8),
    "hadamard": st.booleans(),
    "special": st.sampled_from([None, torch.inf, -torch.inf, torch.nan]),
    "seed": st.integers(0, 1000),
}
"""Strategies for a grid and what is quantized on it."""


@cache
def built(target: str) -> ctypes.CDLL:
    """The kernels for `target`; setup.py compiles what is not current."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    once(f"kernels for {target}", lambda folder: compile_in_place(target))
    return ctypes.CDLL(str(library.file(target)))


def compile_in_place(target: str) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = {**os.environ, library.CPU: target}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr


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


def flat(found: Any) -> list[torch.Tensor]:
    """Tensors in any nesting."""
    return [found] if isinstance(found, torch.Tensor) else [entry for each in found for entry in flat(each)]


def alike(work: Callable[[Any], Any]) -> Any:
    """What `work` comes to in C++: the bits of what it comes to in the reference."""
    ours, theirs = work(cpu), work(reference)
    assert_same_bits(flat(ours), flat(theirs))
    return ours


def stored(state: torch.Tensor, store: str) -> tuple[torch.Tensor, ...]:
    """The tensors in which a feedback keeps `state`, in new memory."""
    if store == "int8":
        return encode_int8(state)
    return (state.clone() if store == "fp32" else state.bfloat16(),)


def passes(x: torch.Tensor, state: torch.Tensor, factor: float, share: float) -> dict[str, tuple[Any, ...]]:
    """Arguments of each pass of a feedback over a message, by its name."""
    return {
        "delta": (x, state, factor),
        "add_residual": (x, state, factor, x.isfinite().all()),
        "update_residual": (x, state, x.flip(0).contiguous(), factor, share, 1 - share),
    }


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
