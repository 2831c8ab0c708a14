"""Registries of named classes, and the models of their options."""

from ds_compress.registry.named import Named, Registry
from ds_compress.registry.options import Options, Steps, validate

__all__ = ["Named", "Options", "Registry", "Steps", "validate"]
