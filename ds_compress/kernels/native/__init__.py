"""Passes over CPU tensors in C++: each source here is compiled when the first long tensor needs it, once a
process.

Every one has a plain counterpart in torch that gives the same bits and serves where the compiler fails.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

from ds_compress.kernels.memory import keep_freed

logger = logging.getLogger(__name__)

LONG = 1 << 16
"""From so many entries on compiled passes are used."""

FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")

COMPILE_SECONDS = 600
"""After which a compiler is taken to hang: it needs two, however many others share the processor."""

_compiling = threading.Lock()


def serves(source: str, entries: int) -> bool:
    """Whether a tensor of the CPU of so many entries is worth it, and `source` is there."""
    if entries < LONG:
        return False
    keep_freed(entries * torch.float32.itemsize)
    return library(source) is not None


@cache
def library(source: str) -> ctypes.CDLL | None:
    """The compiled functions of `source`, or None where that fails, which is said once.

    Nothing is kept on disk: compiling takes about a second, and a kept file would have to be known to fit the
    processor, where machines share their home directory.
    """
    with _compiling:
        return _compiled(source)


@cache  # for the thread that asked while another one compiled
def _compiled(source: str) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"{source}.so")
            words = command(compiler, source, file)
            subprocess.run(
                words, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS
            )
            return ctypes.CDLL(str(file))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("%s of kernels/native runs uncompiled, several times slower: %s", source, _why(error))
        return None


def command(compiler: str, source: str, file: Path, target: str = "native") -> list[str]:
    """What compiles `source` to `file` for processors of `target`, a word of `-march`."""
    path = Path(__file__).with_name(f"{source}.cpp")
    return [*shlex.split(compiler), *FLAGS, f"-march={target}", "-o", str(file), str(path)]


def _why(error: Exception) -> str:
    """The first line that the compiler wrote, or else of `error`."""
    lines = ((getattr(error, "stderr", None) or b"").decode(errors="replace") + f"\n{error}").splitlines()
    return next(filter(str.strip, lines), type(error).__name__).strip()


@cache
def _compiler() -> str | None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        logger.warning(
            "codecs on the CPU run uncompiled, several times slower: no C++ compiler found; set CXX to one"
        )
    return compiler
