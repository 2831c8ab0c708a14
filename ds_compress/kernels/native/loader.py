"""Libraries of this process: asked for, made by a thread beside training, and there once they are."""

import atexit
import contextlib
import ctypes
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from ds_compress.kernels.native import build, cache, prebuilt

logger = logging.getLogger(__name__)

SOURCES = (
    *("quantize", "quantize_feedback", "selection", "kth_largest", "gather_scatter"),
    *("fp8", "fixed_point", "entropy", "feedback", "byte_shuffle"),
)

AGAIN_SECONDS = 60.0
"""After a build that was interrupted the next one may start so much later, then twice as much, ..."""

loaded: dict[str, ctypes.CDLL] = {}
"""By their sources."""

_builds: dict[str, "_Build"] = {}


def ask(source: str) -> ctypes.CDLL | None:
    """The library of `source` if it is there, or came with the package; if not, and nobody is at it, a thread
    starts to make it."""
    latest = _builds.get(source)
    if latest is None or latest.may_follow():
        with build.forking:
            library = prebuilt.load(source) if latest is None else None
            if library is not None:
                loaded[source] = library
            elif _builds.get(source) is latest:
                build_it = _Build(source, latest)
                with contextlib.suppress(RuntimeError):  # no thread can be had: the next message asks again
                    build_it.start()
                    _builds[source] = build_it
    return loaded.get(source)


def wait(*sources: str) -> bool:
    """Let the thread that makes each of `sources`, or of all there are, come to its end, once; whether they
    are there then. For what measures, and for tests: training never waits."""
    for source in sources or SOURCES:
        if ask(source) is None and source in _builds:
            _builds[source].join()
    return all(source in loaded for source in sources or SOURCES)


class _Build(threading.Thread):
    """Makes one library, in one attempt."""

    def __init__(self, source: str, before: "_Build | None"):
        super().__init__(name=f"ds_compress compiles {source}", daemon=True)
        self.source = source
        self.pause: float = 2 * before.pause if before else AGAIN_SECONDS
        self.first = before is None
        self.again_at: float | None = None

    def may_follow(self) -> bool:
        """Whether another attempt is due."""
        return self.again_at is not None and time.monotonic() >= self.again_at

    def run(self) -> None:
        try:
            library = _made(self.source)
        except (build.Refused, ValueError) as error:
            self._warn(str(error))
        except (build.Interrupted, OSError) as error:
            self.again_at = time.monotonic() + self.pause
            if self.first and not build.ending.is_set():
                self._warn(f"{error}; this will be tried again")
        else:
            if library is not None:
                loaded[self.source] = library

    def _warn(self, reason: str) -> None:
        text = "%s of kernels runs uncompiled, several times slower: %s"
        logger.warning(text, self.source, reason)


def _made(source: str) -> ctypes.CDLL | None:
    """The library of `source`, kept or compiled; None where no compiler is found, which has been said.

    Raises:
        Refused, Interrupted, OSError, ValueError: see `compile_source`.
    """
    compiler = build.compiler()
    if compiler is None:
        return None
    target = prebuilt.asked() or "native"
    name = f"{cache.key(build.identity(compiler, target), build.files(source))}-{source}.so"
    for folder in cache.folders():
        try:
            return _load(folder / name) or _load_or_compile(folder / name, compiler, source, target)
        except OSError as error:  # no room, read-only, or nothing there may be run
            logger.info("compiled code is not kept in %s: %s", folder, error)
    with tempfile.TemporaryDirectory() as place:
        return ctypes.CDLL(str(build.compile_source(compiler, source, Path(place), target)))


def _load_or_compile(file: Path, compiler: str, source: str, target: str) -> ctypes.CDLL:
    with cache.turn(file, build.ending) as alone:
        library = _load(file)  # as another process may have made it
        if library is None:
            cache.sweep(file, alone)
            place = cache.workplace(file)
            try:
                cache.keep(build.compile_source(compiler, source, place, target), file)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            library = _load(file)
        if library is None:
            raise OSError(f"{file} cannot be loaded")
        return library


def _load(file: Path) -> ctypes.CDLL | None:
    with build.forking:
        return cache.load(file)


@atexit.register
def _end() -> None:
    build.end_all()
    for each in _builds.values():
        each.join(1)  # it takes away what it made


os.register_at_fork(after_in_child=_builds.clear)
