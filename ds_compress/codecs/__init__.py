"""Codec families; importing this package registers all of them."""

from ds_compress.codecs import casts, sparse, topk

__all__ = ["casts", "sparse", "topk"]
