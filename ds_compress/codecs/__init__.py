"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import acsgd, casts, minmax, quantize

__all__ = ["acsgd", "casts", "minmax", "quantize"]
