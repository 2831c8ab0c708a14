"""Compressed messages between the pipeline stages of DeepSpeed."""

__version__ = "0.1.0"
