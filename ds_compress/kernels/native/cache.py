"""Where compiled libraries are kept: one of each kind for all processes of a user, and only what is ours is
loaded."""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

TURN_SECONDS = 600.0
"""After which a process that holds the lock is taken to hang, and is no longer waited for."""

KEPT_DAYS = 60
"""A file that nobody has loaded for so long goes when another one is built."""

CPUINFO = Path("/proc/cpuinfo")
_PROCESSOR = (  # what `-march=native` depends on, on x86, ARM, POWER and RISC-V
    *("vendor_id", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("cpu", "isa", "uarch"),
)

_DIGEST = hashlib.sha256().digest_size


def folders() -> Iterator[Path]:
    """Those that may hold our libraries, best first; made where they are not there."""
    candidates: tuple[Callable[[], Path], ...] = (_of_user, _temporary)
    for candidate in candidates:
        with suppress(OSError, RuntimeError):  # no home, no temporary folder, or nothing can be made there
            folder = candidate()
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            reason = _open_to_others(folder)
            if not reason:
                yield folder
            else:
                _say_refused(folder, reason)


def _of_user() -> Path:
    told = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(told) if os.path.isabs(told) else Path.home() / ".cache"
    return base / "ds_compress"


def _temporary() -> Path:
    return Path(tempfile.gettempdir(), f"ds_compress-{os.geteuid()}")


def _open_to_others(folder: Path) -> str:
    """Why someone else may have put a file into `folder`, or may put another one in its place; or ""."""
    found, around = folder.lstat(), folder.parent.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder but a link, or a file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"it has mode {stat.S_IMODE(found.st_mode):04o}"
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        return f"anybody may rename what is in {folder.parent}"
    return ""


@cache  # said once
def _say_refused(folder: Path, reason: str) -> None:
    text = "compiled code is not kept in %s: %s; expected a folder of ours alone (0700)"
    logger.warning(text, folder, reason)


def key(words: Iterable[str], files: Iterable[Path]) -> str:
    """Another one wherever the library may be another one: by the `words` that say how it is compiled, by
    what is in `files`, by the processor, as homes are shared, and by the C library."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    said = repr((*words, platform.machine(), libc, processor()))
    digest = hashlib.sha256(said.encode())
    for file in sorted(files):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def processor() -> tuple[str, ...]:
    """What `-march=native` makes something else of; of machines that do not say, their name."""
    try:
        with CPUINFO.open(errors="replace") as lines:
            first = []  # the one of the first processor: there may be hundreds
            for line in lines:
                if not line.strip():
                    break
                first.append(line)
    except OSError:
        first = []
    pairs = (line.partition(":") for line in first)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    said = tuple(f"{name}: {found[name]}" for name in _PROCESSOR if name in found)
    return said or (platform.node(),)


def load(file: Path) -> ctypes.CDLL | None:
    """The library in `file`, or None where there is none, or none that is whole and ours."""
    try:
        found = file.lstat()
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        # a file that has been cut short would end the process, not the loading
        if not ours or not _whole(file.read_bytes()):
            return None
        library = ctypes.CDLL(str(file))
    except OSError:
        return None
    with suppress(OSError):
        os.utime(file)  # it is in use
    return library


def _whole(content: bytes) -> bool:
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def keep(made: Path, file: Path) -> None:
    """Make the library `made` the one in `file`, in one go; behind it stands its hash, which no loader of
    libraries looks at."""
    content = made.read_bytes()
    made.chmod(0o600)
    made.write_bytes(content + hashlib.sha256(content).digest())
    made.replace(file)


@contextmanager
def turn(file: Path, ending: threading.Event) -> Iterator[bool]:
    """Wait while another process makes `file`; whether it is our turn alone, as it is unless that one hangs.
    Nor is there a reason to wait when this process is `ending`.

    The kernel frees the lock of a process that ends, however it ends; a forked process does not have it.
    """
    lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.utime(lock)
        deadline = time.monotonic() + TURN_SECONDS
        while not (alone := _locked(lock)) and time.monotonic() < deadline and not ending.wait(0.05):
            pass
        yield alone
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which of the two is up to the system
        return False
    return True


def workplace(file: Path) -> Path:
    """A new folder beside `file` to make it in."""
    place = file.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.build")
    place.mkdir(mode=0o700)
    return place


def sweep(file: Path, alone: bool) -> None:
    """Remove what builds of `file` that were killed have left, where no other one can be under way; and of
    all files those that nobody needs any more."""
    if alone:
        for place in file.parent.glob(f"{file.stem}.*.build"):
            shutil.rmtree(place, ignore_errors=True)
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in file.parent.iterdir():
        with suppress(OSError):  # another process may do the same
            if path.suffix in (".so", ".lock", ".build") and path.lstat().st_mtime < oldest:
                shutil.rmtree(path) if path.suffix == ".build" else path.unlink()
