"""Switching on: `pip install` is enough.

torch calls `hook` at the end of `import torch` (entry point of group "torch.backends"); `import ds_compress`
calls it too. It waits for the import of `deepspeed.runtime.pipe.engine` and wraps `PipelineEngine.__init__`,
so it reaches every engine, also of projects with their own `initialize` or subclass. Not the module
`deepspeed`: when a script imports deepspeed before torch, that one is only half imported at this point.

An engine whose ds_config has no "ds_compress" key is left alone.
"""

import functools
import importlib.util
import logging
import sys
from typing import Any

TARGET = "deepspeed.runtime.pipe.engine"
KEY = "ds_compress"

logger = logging.getLogger("ds_compress")


def hook() -> None:
    """Wrap DeepSpeed's pipeline engine, now or when it is imported; never raises: that would break `import
    torch`."""
    try:
        if TARGET in sys.modules:
            _wrap(sys.modules[TARGET])
        elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception:
        logger.exception("ds_compress could not hook %s: compression stays off", TARGET)


class _Finder:
    """Lets the import system find the target as it would without us, then wraps what was loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(module: Any) -> None:
    engine_class = getattr(module, "PipelineEngine", None)
    if engine_class is None or hasattr(engine_class.__init__, "_ds_compress"):
        return
    original = engine_class.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        if KEY in getattr(kwargs.get("config_class"), "_param_dict", {}):
            from ds_compress.pipeline.attach import prepare

            prepare()
        original(self, *args, **kwargs)
        ds_config = getattr(self._config, "_param_dict", {})
        if KEY in ds_config:
            from ds_compress.pipeline.attach import attach

            attach(self, module, ds_config[KEY])
        elif self.global_rank == 0:
            _warn_of_near_misses(ds_config)

    __init__._ds_compress = True
    engine_class.__init__ = __init__


def near_misses(ds_config: dict[str, Any]) -> list[str]:
    """Keys that look like a misspelt "ds_compress"."""
    import difflib

    def plain(key):
        return str(key).lower().replace("_", "").replace("-", "")

    return [key for key in ds_config if difflib.SequenceMatcher(None, plain(key), plain(KEY)).ratio() >= 0.85]


def _warn_of_near_misses(ds_config: dict[str, Any]) -> None:
    """DeepSpeed ignores keys it does not know, so a misspelt one would train uncompressed without a word."""
    for key in near_misses(ds_config):
        logger.warning(
            "ds_config key %r is unknown to DeepSpeed: did you mean %r? Training uncompressed.", key, KEY
        )
