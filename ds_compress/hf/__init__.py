"""Transformers checkpoints as DeepSpeed pipelines; needs `pip install ds_compress[hf]`."""

from ds_compress.hf.model import pipeline_module

__all__ = ["pipeline_module"]
