"""Codecs that are known for the time of one test."""

from contextlib import contextmanager

from ds_compress.codec import CODECS


@contextmanager
def own_codecs():
    """What is registered inside is forgotten at the end."""
    before = CODECS._classes
    CODECS._classes = dict(before)
    try:
        yield
    finally:
        CODECS._classes = before
