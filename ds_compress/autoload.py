"""Switching on: `pip install` is enough.

torch calls `hook` at the end of `import torch` (entry point of group "torch.backends"); `import ds_compress`
calls it too. It waits for the import of DeepSpeed's engines and wraps their constructors: `PipelineEngine`'s,
to compress, and that of `DeepSpeedEngine`, from which it derives, to say where nothing can be compressed. So
it reaches every engine, also of projects with their own `initialize` or subclass. Not the module `deepspeed`:
when a script imports deepspeed before torch, that one is only half imported at this point.

An engine whose ds_config has no "ds_compress" key is left alone, unless the environment variable
DS_COMPRESS_REQUIRE=1 makes training uncompressed an error.
"""

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ds_compress.errors import REQUIRE, CompressionError, is_required

PIPELINE = "deepspeed.runtime.pipe.engine"
PLAIN = "deepspeed.runtime.engine"
KEY = "ds_compress"

MARK = "_ds_compress"  # of a constructor that is wrapped
FIRST_USES = ("_exec_schedule", "save_checkpoint", "load_checkpoint")
"""Methods that a pipeline engine has, of which all ranks call the same one first."""

_in_construction: set[int] = set()  # ids of the engines in the constructor of `PipelineEngine`

logger = logging.getLogger("ds_compress")


def hook() -> None:
    """Wrap DeepSpeed's engines, now or when they are imported; raises only where compression is required, as
    anything else would break `import torch`."""
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
    """Lets the import system find an engine's module as it would without us, then wraps what was loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ENGINES:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:  # not there: the import system says so
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        loader.exec_module = exec_module
        return spec


def _wrap(module: ModuleType) -> None:
    """Put `ENGINES`' function for `module` round the constructor of its engine, once."""
    name, around = ENGINES[module.__name__]
    engine_class: Any = getattr(module, name, None)
    if engine_class is None or getattr(engine_class.__init__, MARK, None) == name:
        return
    original = engine_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        around(self, module, functools.partial(original, self, *args, **kwargs), kwargs)

    setattr(__init__, MARK, name)
    engine_class.__init__ = __init__


def _around_pipeline(
    engine: Any, module: ModuleType, build: Callable[[], None], kwargs: dict[str, Any]
) -> None:
    """Have `build` make a `PipelineEngine`, then compress what it sends."""
    _prepare(kwargs)
    _in_construction.add(id(engine))
    try:
        build()
    finally:
        _in_construction.discard(id(engine))
    ds_config = _ds_config(engine)
    if KEY in ds_config:
        _entrance().attach(engine, module, ds_config[KEY])
    else:
        _without_key(engine, ds_config)


def _prepare(kwargs: dict[str, Any]) -> None:
    """Before a pipeline engine with the key is built; `kwargs`: of its constructor."""
    if KEY in getattr(kwargs.get("config_class"), "_param_dict", {}):
        _entrance().prepare()


def _entrance() -> ModuleType:
    try:
        from ds_compress.engine import attach
    except ImportError as error:
        raise CompressionError(f"ds_compress: this DeepSpeed or torch is not supported: {error}") from error
    return attach


def _around_plain(engine: Any, module: ModuleType, build: Callable[[], None], kwargs: dict[str, Any]) -> None:
    """Have `build` make a `DeepSpeedEngine`. Compress what it sends if it is a pipeline engine that does not
    call `PipelineEngine`'s constructor; where it is none, the key has no effect."""
    is_pipeline = all(hasattr(type(engine), name) for name in ("_exec_schedule", "_INSTRUCTION_MAP"))
    if is_pipeline and id(engine) not in _in_construction:
        _prepare(kwargs)
    build()
    if id(engine) in _in_construction:  # `_around_pipeline` goes on
        return
    ds_config = _ds_config(engine)
    if KEY not in ds_config:
        _without_key(engine, ds_config)
        return
    if is_pipeline:
        _attach_when_used(engine, ds_config[KEY])
        return
    from ds_compress.config import Config

    config = Config(ds_config[KEY])
    config.leave_uncompressed(
        f"{type(engine).__name__} is not a pipeline, and only what the stages of one send is compressed; "
        "it takes a model that is a deepspeed.pipe.PipelineModule of two stages or more"
    )
    for note in config.notes if engine.global_rank == 0 else ():
        logger.warning(note)


def _attach_when_used(engine: Any, block: object) -> None:
    """Compress what a pipeline engine sends from its first schedule or checkpoint on: its constructor is at
    work, and has not made what `attach` needs."""

    def attach_first(name: str) -> Callable[..., Any]:
        def use(*args: Any, **kwargs: Any) -> Any:
            for each in FIRST_USES:
                vars(engine).pop(each, None)
            _entrance().attach(engine, sys.modules[PIPELINE], block)
            return getattr(engine, name)(*args, **kwargs)

        return use

    vars(engine).update({name: attach_first(name) for name in FIRST_USES})


ENGINES: dict[str, tuple[str, Callable[..., None]]] = {
    PIPELINE: ("PipelineEngine", _around_pipeline),
    PLAIN: ("DeepSpeedEngine", _around_plain),
}
"""By module: the class, and what goes round its constructor."""


def _ds_config(engine: Any) -> dict[str, Any]:
    return getattr(engine._config, "_param_dict", {})


def _without_key(engine: Any, ds_config: dict[str, Any]) -> None:
    """Refuse to train, where compression is required; else look for a misspelt key.

    DeepSpeed ignores keys it does not know, so a misspelt one would train uncompressed without a word.
    """
    near = near_misses(ds_config)
    if is_required():
        hint = f" (did you mean it by {near[0]!r}?)" if near else ""
        raise CompressionError(f'ds_compress: {REQUIRE} is set, but ds_config has no "{KEY}" key{hint}')
    for key in near if engine.global_rank == 0 else ():
        logger.warning(
            "ds_config key %r is unknown to DeepSpeed: did you mean %r? Training uncompressed.", key, KEY
        )


def near_misses(ds_config: dict[str, Any]) -> list[str]:
    """Keys that look like a misspelt "ds_compress"."""
    import difflib

    def plain(key: object) -> str:
        return str(key).lower().replace("_", "").replace("-", "")

    return [key for key in ds_config if difflib.SequenceMatcher(None, plain(key), plain(KEY)).ratio() >= 0.85]
