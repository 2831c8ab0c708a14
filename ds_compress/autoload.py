"""Hook DeepSpeed's engines when torch is imported, so that `pip install` is enough.

torch calls `hook` at the end of `import torch` (entry point of group "torch.backends"); `import ds_compress`
calls it too. The hook wraps the constructors of DeepSpeed's engines when these are imported: that of
`PipelineEngine` to compress, and that of its base `DeepSpeedEngine` to warn if nothing can be compressed.
This covers every engine, also in projects with their own `initialize` or subclass. The hook does not touch
the module `deepspeed`: if a script imports deepspeed before torch, that module is only partly imported at
this point.

An engine whose ds_config has no "ds_compress" key is not changed. With the environment variable
DS_COMPRESS_REQUIRE=1, training uncompressed is an error. With DS_COMPRESS_HOOK=0 nothing is hooked: call
`ds_compress.attach`.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ds_compress.errors import REQUIRE, CompressionError, is_required

PIPELINE = "deepspeed.runtime.pipe.engine"
ENGINES = {PIPELINE: "PipelineEngine", "deepspeed.runtime.engine": "DeepSpeedEngine"}
"""For each module the class whose constructor is wrapped."""

KEY = "ds_compress"
HOOK = "DS_COMPRESS_HOOK"
"""Environment variable: 0 switches the hook off."""

MARK = "_ds_compress"  # attribute of wrapped constructors
FIRST_USES = ("_exec_schedule", "save_checkpoint", "load_checkpoint")
"""Methods of a pipeline engine; all ranks call the same one of them first."""

_in_construction: set[int] = set()  # ids of the engines whose wrapped constructor is running

logger = logging.getLogger("ds_compress")


def hook() -> None:
    """Wrap DeepSpeed's engines, now or when they are imported.

    Errors are only raised if compression is required; otherwise they would break `import torch`.
    """
    if os.environ.get(HOOK) == "0":
        return
    try:
        for target in ENGINES:
            if target in sys.modules:
                _wrap(sys.modules[target])
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        if is_required():
            raise CompressionError(
                f"ds_compress: {REQUIRE} is set, but DeepSpeed could not be hooked: {error}"
            ) from error
        logger.exception("ds_compress could not hook DeepSpeed: compression stays off")


class _Finder:
    """Finds an engine's module through the other finders, and wraps its engine after it has loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ENGINES:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:  # not installed: the import system raises
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        loader.exec_module = exec_module
        return spec


def _wrap(module: ModuleType) -> None:
    """Wrap the constructor of the engine in `module`, once."""
    name = ENGINES[module.__name__]
    engine_class: Any = getattr(module, name, None)
    if engine_class is None or getattr(engine_class.__init__, MARK, None) == name:
        return
    original = engine_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _around(name, self, functools.partial(original, self, *args, **kwargs), kwargs)

    setattr(__init__, MARK, name)
    engine_class.__init__ = __init__


def _around(name: str, engine: Any, build: Callable[[], None], kwargs: dict[str, Any]) -> None:
    """Construct an engine by calling `build`, the constructor of class `name`, and compress what it sends.

    The constructor of `PipelineEngine` calls that of `DeepSpeedEngine`: the outer one of the two does all
    this. Pipeline engines that do not call `PipelineEngine`'s are attached to when they are used. For engines
    without a pipeline the key has no effect, and a warning is logged.
    """
    if id(engine) in _in_construction:
        build()
        return
    is_pipeline = all(hasattr(type(engine), each) for each in ("_exec_schedule", "_INSTRUCTION_MAP"))
    if is_pipeline and KEY in getattr(kwargs.get("config_class"), "_param_dict", {}):
        _entrance().prepare()
    _in_construction.add(id(engine))
    try:
        build()
    finally:
        _in_construction.discard(id(engine))
    ds_config = getattr(engine._config, "_param_dict", {})
    if KEY not in ds_config:
        _without_key(engine, ds_config)
    elif is_pipeline and name != ENGINES[PIPELINE]:
        _attach_when_used(engine, ds_config[KEY])
    else:
        _entrance().attach(engine, ds_config[KEY])


def _entrance() -> ModuleType:
    """Import the module that attaches to engines."""
    try:
        from ds_compress.engine import attach
    except ImportError as error:
        raise CompressionError(f"ds_compress: this DeepSpeed or torch is not supported: {error}") from error
    return attach


def _attach_when_used(engine: Any, block: object) -> None:
    """Attach to a pipeline engine at its first schedule or checkpoint.

    Its constructor is still running and has not created what `attach` needs.
    """

    def attach_first(name: str) -> Callable[..., Any]:
        def use(*args: Any, **kwargs: Any) -> Any:
            for each in FIRST_USES:
                vars(engine).pop(each, None)
            _entrance().attach(engine, block)
            return getattr(engine, name)(*args, **kwargs)

        return use

    vars(engine).update({name: attach_first(name) for name in FIRST_USES})


def _without_key(engine: Any, ds_config: dict[str, Any]) -> None:
    """Raise an error if compression is required, else warn about a misspelt key.

    DeepSpeed ignores unknown keys, so with a misspelt key training would silently run uncompressed.
    """
    near = near_misses(ds_config)
    if is_required():
        hint = f" (did you mean it by {near[0]!r}?)" if near else ""
        raise CompressionError(f'ds_compress: {REQUIRE} is set, but ds_config has no "{KEY}" key{hint}')
    for key in near if engine.global_rank == 0 else ():
        logger.warning(
            f"ds_config key {key!r} is unknown to DeepSpeed: did you mean {KEY!r}? Training uncompressed."
        )


def near_misses(ds_config: dict[str, Any]) -> list[str]:
    """Return the keys that look like a misspelt "ds_compress"."""
    import difflib

    def plain(key: object) -> str:
        return str(key).lower().replace("_", "").replace("-", "")

    return [key for key in ds_config if difflib.SequenceMatcher(None, plain(key), plain(KEY)).ratio() >= 0.85]
