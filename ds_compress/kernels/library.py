"""Choose and load the compiled kernels: setup.py makes one library for each instruction set at installation.

setup.py also reads this file, before anything is installed: at the top it imports the standard library alone.
"""

import ctypes
import hashlib
import logging
import os
import platform
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""Where the libraries are, and in a source tree the C++ sources below it."""

FLAGS = ("-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fPIC", "-pthread", "-Wall", "-Wextra")
"""How the sources are compiled, for any instruction set."""

CPU = "DS_COMPRESS_CPU"
"""Environment variable: the instruction set to use, to measure what another processor would run."""

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_X86_64 = {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2}

BUILD_ID = "ds_compress_build_id"
"""The symbol of a library that holds its version and the hash of its sources."""


def instruction_sets() -> dict[str, frozenset[str]]:
    """Return the instruction sets of this kind of machine, best first, with the features that each needs."""
    machine = platform.machine()
    return _X86_64 if machine == "x86_64" else {machine: frozenset()}


@cache
def features() -> frozenset[str]:
    """Return the features of this processor, as /proc/cpuinfo names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def supported() -> list[str]:
    """Return the instruction sets that this processor has, best first."""
    return [name for name, needed in instruction_sets().items() if needed <= features()]


def file(instruction_set: str) -> Path:
    """Return the path of the library for `instruction_set`, which need not exist."""
    return FOLDER / f"libkernels-{instruction_set}.so"


def sources() -> list[Path]:
    """Return the C++ files of a source tree; none if the package was installed without them."""
    return sorted(path for path in FOLDER.rglob("*") if path.suffix in (".cpp", ".h"))


def sources_hash() -> str:
    """Hash all C++ files, the version and the compiler's flags: equal hashes, equal libraries."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in [FOLDER.parent / "version.py", *sources()]:
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(library: Path) -> bool:
    """Return whether `library` was compiled from the sources of this tree."""
    return library.exists() and sources_hash().encode() in library.read_bytes()


def instruction_set() -> str | None:
    """Return the instruction set whose library this process uses: the best one, or that of DS_COMPRESS_CPU.

    Returns:
        None if no library is installed that this processor can run.

    Raises:
        CompressionError: DS_COMPRESS_CPU names an instruction set that is unknown, that this processor lacks,
            or for which nothing was compiled.
    """
    usable = [name for name in supported() if file(name).exists()]
    asked = os.environ.get(CPU)
    if not asked:
        return next(iter(usable), None)
    if asked not in usable:
        raise _refusal(asked, usable)
    return asked


def _refusal(asked: str, usable: Iterable[str]) -> Exception:
    from ds_compress.errors import CompressionError, shown

    known = instruction_sets()
    if asked not in known:
        reason = f"is no instruction set of this kind of machine ({platform.machine()})"
    elif missing := sorted(known[asked] - features()):
        reason = f"needs {', '.join(missing)}, which this processor lacks"
    else:
        reason = f"is not compiled; `{CPU}={asked} python setup.py build_ext --inplace` does it"
    return CompressionError(f"{CPU}: {shown(asked)} {reason}; expected one of: {', '.join(usable) or 'none'}")


def _is_complete(path: Path) -> bool:
    """Return whether the ELF file `path` ends where its header says: behind the table of its sections.

    The system opens a shorter one all the same, and ends the process when something in the missing part is
    used.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return False
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(path.stat().st_size >= start + size * count)


@cache
def load() -> ctypes.CDLL | None:
    """Load the library for this processor, once in a process.

    Returns:
        None where there is none that can be used: codecs run in PyTorch, and one warning says why.

    Raises:
        CompressionError: see `instruction_set`.
    """
    name = instruction_set()
    try:
        return _opened(name)
    except OSError as error:
        slower = "tens of times slower, entropy in about 0.1 s for each MB of a message"
        logger.warning(f"ds_compress: codecs on the CPU run in PyTorch, {slower}: {error}")
        return None


def _opened(name: str | None) -> ctypes.CDLL:
    """Open the library for the instruction set `name`.

    Raises:
        OSError: there is none, or it belongs to other sources or another version.
    """
    from ds_compress.version import __version__

    if name is None:
        remedy = "install ds_compress again where there is a C++ compiler"
        if sources():
            remedy = "a source tree: start elsewhere, or run `python setup.py build_ext --inplace` in it"
        raise OSError(f"no compiled kernels for this processor in {FOLDER}; {remedy}")
    path = file(name)
    if not _is_complete(path):
        raise OSError(f"{path} is cut off; install ds_compress again")
    library = ctypes.CDLL(str(path))
    try:
        build_id = ctypes.c_char_p.in_dll(library, BUILD_ID).value or b""
    except ValueError:
        raise OSError(f"{path} is no library of ds_compress; install ds_compress again") from None
    version, _, sources_of_library = build_id.decode(errors="replace").partition(" ")
    if version != __version__:
        raise OSError(
            f"{path} belongs to version {version}, this is {__version__}; install ds_compress again"
        )
    if sources() and sources_of_library != sources_hash():
        raise OSError(f"{path} is older than its C++ sources; run `python setup.py build_ext --inplace`")
    return library
