"""Transformers checkpoints as DeepSpeed pipelines; needs `pip install "ds_compress[hf]"`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_compress.hf.model import pipeline_module

__all__ = ["pipeline_module"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command can say what to install where Transformers is missing."""
    if name != "pipeline_module":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_compress.hf.model import pipeline_module

    return pipeline_module
