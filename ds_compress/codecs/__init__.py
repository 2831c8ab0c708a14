"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import acsgd, casts, fp8, minmax, quantize

__all__ = ["acsgd", "casts", "fp8", "minmax", "quantize"]
