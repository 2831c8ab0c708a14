"""Import modules that register the user's codecs and feedbacks.

A training script imports its own modules. An installed package declares its modules in setup.cfg, and every
process that uses ds_compress imports them (training, `simulate` and the commands):

    [options.entry_points]
    ds_compress.plugins =
        mine = my_codecs

Commands import further modules or files with `--import`.
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import cast

from ds_compress.errors import CompressionError

GROUP = "ds_compress.plugins"


@functools.cache
def load_installed() -> None:
    """Import the modules that installed packages declare, once per process.

    Raises:
        CompressionError: a module cannot be imported; the line names it.
    """
    for point in entry_points(group=GROUP):
        package = f" of {point.dist.name}" if point.dist else ""
        _run(point.load, f"plugin {point.value!r}{package}")


def load(place: str) -> None:
    """Import a module by name, also from the working directory, or a file by a path that ends in .py.

    Raises:
        CompressionError: it cannot be imported; the line names it.
    """
    if place.endswith(".py"):
        _run(lambda: module_at(Path(place).resolve()), f"--import {place}")
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _run(lambda: importlib.import_module(place), f"--import {place}")


def module_at(path: Path) -> ModuleType:
    """Import the file at an absolute path as a module, once; errors of the file propagate."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) == str(path):
            return module
    name = f"ds_compress_import_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    spec = cast(ModuleSpec, importlib.util.spec_from_file_location(name, path, loader=loader))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # inspect.getsource looks there
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run(load: Callable[[], object], what: str) -> None:
    """Call `load` and convert any error to a CompressionError of one line."""
    try:
        load()
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise CompressionError(f"{what} cannot be imported: {type(error).__name__}: {reason}") from error
