"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import casts, learned, lossless, lowrank

__all__ = ["casts", "learned", "lossless", "lowrank"]
