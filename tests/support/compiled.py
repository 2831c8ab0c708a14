"""Processes with a compiler that can be watched and a cache of their own."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.warm import interpreter

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")

# Asked for its version it says it; asked to compile it takes note, does what it is told, and compiles. It
# does not optimize: that takes most of a compiler's time, and tests run what it makes for milliseconds
SCRIPT = """#!/bin/sh
case "$*" in *--version*) exec {compiler} --version;; esac
echo compile >> $STATE/compiles
eval "$BEFORE"
exec {compiler} "$@" -O0
"""

WAITS = """
from ds_compress.kernels import native
print(native.wait("selection"))
"""

MESSAGES = """
import hashlib, json, logging, os, sys
from pathlib import Path
import torch
from ds_compress.kernels import cpu, native
from ds_compress.kernels.native import cache, loader

logging.basicConfig(format="%(message)s")
told = json.loads(sys.argv[1])
loader.AGAIN_SECONDS = told["again_seconds"]
cache.TURN_SECONDS = told["turn_seconds"]

def digests():
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(1 << 16, generator=generator)[:5000].sort().values
        bits = cpu.set_bits(indices, 1 << 16)
        back = cpu.list_bits(bits, 1 << 16, 5000)
        found += [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in (bits, back)]
    return found

done = {"slow": [], "attempts": []}
if told["slow_first"]:
    done["slow"] = digests()
    assert native.library("selection") is None
    Path(os.environ["STATE"], "go").touch()
while not done["attempts"] or (not done["attempts"][-1] and len(done["attempts"]) < 3):
    done["attempts"].append(native.wait("selection"))
done["fast"] = digests()
done["compiled"] = native.library("selection") is not None
print(json.dumps(done))
"""


def environment(state: Path, before: str = "") -> dict[str, str]:
    """In which the compiler, after the shell commands `before`, is g++; what it counts is in `state`."""
    script, temporary = state / "c++", state / "temporary"
    script.write_text(SCRIPT.format(compiler=COMPILER))
    script.chmod(0o700)
    temporary.mkdir(exist_ok=True)
    return {
        **os.environ,
        "CXX": str(script),
        "BEFORE": before,
        "STATE": str(state),
        "XDG_CACHE_HOME": str(state / "cache"),
        "TMPDIR": str(temporary),
    }


def waiting(state: Path, before: str = "") -> subprocess.Popen[str]:
    """A process, of a session of its own, that waits for a library and says whether it has come."""
    command = [interpreter(), "-c", WAITS]
    environ = environment(state, before)
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def messages(
    state: Path,
    before: str = "",
    slow_first: bool = False,
    again_seconds: float = 60.0,
    turn_seconds: float = 600.0,
) -> dict[str, Any]:
    """What a process encodes and decodes with the library, and before it is there; and what it says."""
    told = {"slow_first": slow_first, "again_seconds": again_seconds, "turn_seconds": turn_seconds}
    command = [interpreter(), "-c", MESSAGES, json.dumps(told)]
    environ = environment(state, before)
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr}


def compiles(state: Path) -> int:
    """How often the compiler has compiled."""
    return len((state / "compiles").read_text().splitlines())
