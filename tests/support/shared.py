"""What the workers of pytest all need, and one of them makes."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

folder_of_run: Path


def begin(basetemp: Path) -> None:
    """Tell where this run of pytest has its temporary files; a worker has a folder of its own there."""
    global folder_of_run
    folder_of_run = basetemp.parent if basetemp.name.startswith("popen-") else basetemp


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run of pytest, which `make` has filled: for the worker that came first, while
    others waited. Nobody may change what is in it. Where `make` failed the next worker calls it again."""
    folder, whole = folder_of_run / name, folder_of_run / f"{name}.whole"
    with (folder_of_run / f"{name}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
