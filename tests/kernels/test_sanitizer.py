"""No compiled pass touches memory beside its buffers, or does what C++ leaves undefined."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native import compile_with
from tests.support.ranks import once

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-O1", "-g", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


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
    command = [sys.executable, "-m", "tests.support.sanitized", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.extended
def test_hostile_packets_and_awkward_sizes():
    done = sanitized()
    assert done.returncode == 0, done.stderr[-6000:]
    count, refused, decoded = map(
        int, re.fullmatch(r"(\d+) messages, (\d+) .*, (\d+) decoded\n", done.stdout).groups()
    )
    assert count > 1000 and refused > 300 and decoded > 100


@pytest.mark.extended
def test_the_sanitizer_sees_an_overflow():
    """The suite would notice: a buffer that is too small ends the process."""
    done = sanitized("overflow")
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "kernels.so" in done.stderr
