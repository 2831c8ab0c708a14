"""Byte shuffle and zstd frames of known size."""
