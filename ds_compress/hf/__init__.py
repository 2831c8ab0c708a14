"""Transformers checkpoints as DeepSpeed pipelines; needs `pip install "ds_compress[hf]"`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_compress.hf.transformers_pipeline import pipeline_module

__all__ = ["pipeline_module"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `finetune` can start, and say what to install, without the extra."""
    if name != "pipeline_module":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ds_compress.hf.transformers_pipeline import pipeline_module
    except ImportError as error:
        raise ImportError(f'{error}; pip install "ds_compress[hf]"') from error

    return pipeline_module
