"""Passes over CPU tensors in C++: each source here is compiled when the first long tensor needs it, once a
process.

Every one has a plain counterpart in torch that gives the same bits and serves where the compiler fails.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ds_compress.kernels.memory import keep_freed

logger = logging.getLogger(__name__)

LONG = 1 << 16
"""From so many entries on compiled passes are used."""

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")
_compiling = threading.Lock()


def serves(source: str, device: torch.device, entries: int) -> bool:
    """Whether `source` serves tensors on `device`, and a tensor of so many entries is worth it."""
    if device.type != "cpu" or entries < LONG:
        return False
    keep_freed(entries * torch.float32.itemsize)
    with _compiling:
        return library(source) is not None


@cache
def library(source: str) -> ctypes.CDLL | None:
    """The compiled functions of `source`, or None where that fails, which is said once.

    Nothing is kept on disk: compiling takes about a second, and a kept file would have to be known to fit the
    processor, where machines share their home directory.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    words = [*compiler.split(), *FLAGS, str(Path(__file__).with_name(f"{source}.cpp")), "-o"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, f"{source}.so"))
            subprocess.run([*words, file], check=True, capture_output=True, text=True, timeout=60)
            return ctypes.CDLL(file)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        logger.warning("%s of kernels/native runs uncompiled, several times slower: %s", source, reason)
        return None


@cache
def _compiler() -> str | None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        logger.warning(
            "codecs on the CPU run uncompiled, several times slower: no C++ compiler found; set CXX to one"
        )
    return compiler


def call(source: str, function: str, *arguments: Tensor | float | None) -> int:
    """Call a C function that takes addresses (of a tensor's memory, which must be contiguous), int64_t and
    float."""
    entry = getattr(library(source), function)
    entry.restype = ctypes.c_int64
    return entry(*map(_argument, arguments))


def _argument(value: Tensor | float | None) -> object:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
