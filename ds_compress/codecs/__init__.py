"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import casts, lossless, lowrank

__all__ = ["casts", "lossless", "lowrank"]
