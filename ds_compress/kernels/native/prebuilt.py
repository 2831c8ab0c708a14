"""Libraries that came with the package, made when it was installed, for all processors of such machines.

Nothing but the standard library is imported, as setup.py reads this file too.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

FOLDER = "prebuilt"

_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NONE = frozenset[str]()

_X86 = {"x86-64-v4": _AVX512, "x86-64-v3": _AVX2, "x86-64": _NONE}
_ARM = {"armv8-a": _NONE}
TARGETS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""For each kind of machine, the words of -march, best first, and what a processor of theirs says it has."""

CPU = "DS_COMPRESS_CPU"
"""The environment variable that names one of them, to run as an older processor would."""


def targets() -> dict[str, frozenset[str]]:
    """Those of this machine."""
    return TARGETS.get(platform.machine(), {})


def name(source: str, target: str) -> str:
    return f"{source}.{target}.so"


@cache
def _abilities() -> frozenset[str]:
    """The flags of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return _NONE
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def asked() -> str | None:
    """The target that the environment names."""
    return os.environ.get(CPU) or None


def instructions(abilities: Callable[[], frozenset[str]] = _abilities) -> str:
    """What the code for this processor is made of: a target, or the kind of machine where it has none."""
    best = (target for target, needed in targets().items() if needed <= abilities())
    return asked() or next(best, platform.machine())


def load(source: str, abilities: Callable[[], frozenset[str]] = _abilities) -> ctypes.CDLL | None:
    """The best library for this processor, or None where the package came without one."""
    folder, only = Path(__file__).with_name(FOLDER), asked()
    for target, needed in targets().items():
        file = folder / name(source, target)
        if only in (None, target) and file.exists() and needed <= abilities():
            try:
                return ctypes.CDLL(str(file))
            except OSError:  # made for another system: what is compiled here serves
                return None
    return None
