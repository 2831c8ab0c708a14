"""Codec families; importing this package registers all of them."""

import importlib
import pkgutil

from ds_compress.codec import build

__all__ = ["build"]

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
