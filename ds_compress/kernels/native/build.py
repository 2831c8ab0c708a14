"""Compiling a source: what runs the compiler, what it is told, and what became of it."""

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

HERE = Path(__file__).parents[1]
"""The folder of all kernels: C++ stands beside the Python of its algorithm."""

FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread")

COMPILE_SECONDS = 600.0
"""After which a compiler is taken to hang: it needs two to ten, and a busy machine has little time for it."""

forking = threading.Lock()
"""Held while a process is started or a library loaded, which must not be cut in two by a fork: the child
would hold the pipes of a compiler open, which its parent reads to their end."""

ending = threading.Event()
"""Set when the interpreter ends: no compiler may start, or be blamed, any more."""

_running = set[subprocess.Popen[bytes]]()

_INTERRUPTED = re.compile(r"\bkilled|terminated program|due to signal|out of memory|memory exhausted", re.I)
_NO_ROOM = re.compile(r"no space left|quota exceeded|read-only file system", re.I)


class Refused(Exception):
    """The compiler does not take the source; it would say so again."""


class Interrupted(Exception):
    """The compiler did not come to its end; it may the next time."""


@cache  # said once
def compiler() -> str | None:
    """The words that call the compiler: $CXX, or the first one that is found."""
    found = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if found is None:
        logger.warning(
            "codecs on the CPU run uncompiled, several times slower: no C++ compiler found; set CXX to one"
        )
    return found


def command(compiler: str, source: str, file: Path, target: str = "native") -> list[str]:
    """What compiles `source` to `file` for processors of `target`, a word of `-march`."""
    (path,) = HERE.rglob(f"{source}.cpp")
    return [*shlex.split(compiler), *FLAGS, f"-march={target}", "-o", str(file), str(path)]


def identity(compiler: str, target: str = "native") -> list[str]:
    """What tells this compiler and what it is told from another one."""
    words = shlex.split(compiler)
    try:
        version = run([*words, "--version"])[1].partition("\n")[0]
    except (OSError, Interrupted):  # a script that knows no such word, or one that hangs
        version = ""
    return [*words, os.path.realpath(shutil.which(words[0]) or words[0]), version, *FLAGS, target]


def files(source: str) -> list[Path]:
    """Those that `source` is compiled from, or may be."""
    return [*HERE.rglob(f"{source}.cpp"), *HERE.rglob("*.h")]


def compile_source(compiler: str, source: str, folder: Path, target: str = "native") -> Path:
    """The library of `source`, made in `folder`, where the compiler has its temporary files too.

    Raises:
        Refused: by the compiler's word.
        Interrupted: it was killed, or took too long.
        OSError: it cannot be run, or there is no room.
        ValueError: it cannot be made words of.
    """
    file = folder / f"{source}.so"
    words = command(compiler, source, file, target)
    status, said = run(words, TMPDIR=str(folder))
    if status == 0:
        return file
    reason = _first_real_line(said) or f"{words[0]} returned non-zero exit status {status}"
    if status < 0 or status > 128 or _INTERRUPTED.search(said):
        raise Interrupted(reason)
    if _NO_ROOM.search(said):
        raise OSError(reason)
    raise Refused(reason)


def run(words: list[str], **variables: str) -> tuple[int, str]:
    """The exit status of a program, and what it wrote; all of its processes are ended after
    COMPILE_SECONDS."""
    with forking:
        if ending.is_set():
            raise Interrupted("the interpreter ends")
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **variables, "LC_ALL": "C"},  # in the words that we look for
        )
        _running.add(process)
    try:
        said = process.communicate(timeout=COMPILE_SECONDS)[0]
    except subprocess.TimeoutExpired as error:
        end(process)
        said = error.stdout or b""
        wrote = _first_real_line(said.decode(errors="replace")) or "nothing"
        raise Interrupted(f"{words[0]} was ended after {COMPILE_SECONDS:g} s, it wrote: {wrote}") from None
    finally:
        _running.discard(process)
        if process.stdout:
            process.stdout.close()
    return process.returncode, said.decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_all() -> None:
    """Let no compiler that this process started outlive it."""
    with forking:
        ending.set()
    for process in [*_running]:
        end(process)


def _first_real_line(said: str) -> str:
    """The first error, or else the first line that is not a mere note."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\berror\b", line, re.I))
    return next(errors, next((line for line in lines if "note:" not in line), ""))


def _in_child() -> None:
    """What the parent compiles is not ours to end."""
    _running.clear()
    forking.release()


os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_in_child)
