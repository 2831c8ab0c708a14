"""Entropy coding with interleaved rANS at a fixed size."""
