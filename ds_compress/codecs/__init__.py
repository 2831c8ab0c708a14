"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import casts, minmax, quantize

__all__ = ["casts", "minmax", "quantize"]
