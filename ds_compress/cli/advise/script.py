"""FILE.py:FUNCTION, as `ds-compress advise --probe` takes it: the layers of a pipeline, and what passes them.

    def pipeline():
        return layers, loss_fn, (inputs, labels)

layers: what `PipelineModule` takes, a list of LayerSpecs, modules and functions, or an nn.Sequential;
loss_fn: of what the last layer gives and of labels, or None where that is the loss; inputs and labels of one
micro-batch: tensors, or tuples of tensors.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from ds_compress.errors import CompressionError, did_you_mean, in_one_line, shown
from ds_compress.registry.plugins import module_at

WANTED = "(layers, loss_fn, (inputs, labels))"


class Script(NamedTuple):
    layers: Sequence[Any]
    loss_fn: Callable[..., Any] | None
    batch: tuple[Any, Any]


def read(place: str) -> Script:
    """Import the file and call the function.

    Raises:
        CompressionError: there is none, it fails, or returns something else; one line.
    """
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not name:
        raise CompressionError(f"{shown(place)} is not allowed: should be FILE.py:FUNCTION")
    path = Path(file).resolve()
    if not path.is_file():
        raise CompressionError(f"there is no file {file}")
    module = _run(lambda: _imported(path))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CompressionError(f"{file} has no function {name!r}{did_you_mean(name, known)}")
    return _checked(_run(function))


def _imported(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))  # as Python does for a script that it runs
    return module_at(path)


def _run(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise CompressionError(in_one_line(error)) from error


def _checked(found: Any) -> Script:
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise CompressionError(f"returned {_kind(found)}; should be {WANTED}")
    layers, loss_fn, batch = found
    if not isinstance(layers, (list, tuple, nn.Sequential, nn.ModuleList)) or not len(layers):
        raise CompressionError(
            f"layers of {WANTED} are {_kind(layers)}; should be a list of them, as PipelineModule takes it, "
            "or an nn.Sequential"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CompressionError(f"loss_fn of {WANTED} is {_kind(loss_fn)}; should be a function, or None")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise CompressionError(f"the micro-batch of {WANTED} is {_kind(batch)}; should be (inputs, labels)")
    return Script(list(layers), loss_fn, (batch[0], batch[1]))


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return "None" if value is None else f"{type(value).__name__}{size}"
