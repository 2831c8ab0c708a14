"""Compressed messages between the pipeline stages of DeepSpeed.

Installed, it is on for every DeepSpeed config with a "ds_compress" key; importing it does the same where
entry points are not loaded. The public names below load on first use; `__init__.pyi` has their types.
"""

import importlib

from ds_compress.autoload import hook

_HOMES = {
    "Codec": "codec",
    "CodecOptions": "codec",
    "CompressionError": "errors",
    "Config": "config",
    "Context": "codec",
    "Feedback": "feedback",
    "FeedbackCodec": "feedback",
    "TensorSpec": "codec",
    "__version__": "version",
    "attach": "engine.attach",
    "build": "codecs",
    "check_codec": "testing",
    "register": "codec",
    "register_feedback": "feedback",
}

__all__ = sorted(_HOMES)

hook()


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
