"""Refuse, before a model is built, settings that its config, its tokenizer or the launch does not fit."""

from typing import Any

import numpy as np
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from transformers import PretrainedConfig

from ds_compress.errors import CompressionError, did_you_mean, shown, shown_key
from ds_compress.hf.settings import NAME, Settings


def check_launch(settings: Settings, processes: int) -> int:
    """Check `settings` for a launch of `processes`; return how many replicas of the pipeline run.

    Raises:
        CompressionError: options contradict each other; the processes cannot be divided into the stages; or
            DeepSpeed's pipelines do not support the ZeRO stage.
    """
    if settings.early_stop and not settings.eval_every:
        raise CompressionError(f"{NAME}.early_stop: counts evaluations, but eval_every is 0; set both")
    if settings.lr_schedule and "scheduler" in settings.ds_config:
        raise CompressionError(
            f'{NAME}.lr_schedule: ds_config has a "scheduler", too; leave one of the two out'
        )
    stages = settings.stages if isinstance(settings.stages, int) else len(settings.stages)
    if stages < 1 or processes % stages:
        raise CompressionError(
            f"{NAME}.stages: {shown(settings.stages)} is not allowed: {processes} processes were started; "
            "their number should be a multiple of the number of stages"
        )
    _check_ds_config(settings.ds_config, f"{NAME}.ds_config")
    zero = zero_stage(settings.ds_config)
    if zero not in (0, 1):
        raise CompressionError(
            f"{NAME}.ds_config.zero_optimization.stage: {shown(zero)} is not allowed: DeepSpeed's pipelines "
            "support 0 and 1"
        )
    return processes // stages


BATCH_SIZES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _check_ds_config(ds_config: dict[str, Any], path: str) -> None:
    """Refuse numbers that Trainer or accelerate would fill in, and an optimizer that nothing has."""
    for key in BATCH_SIZES:
        value = ds_config.get(key)
        if value is not None and (type(value) is not int or value < 1):  # true is an int, too
            raise CompressionError(f"{path}.{key}: {shown(value)} is not allowed: should be 1 or more")
    optimizer = ds_config.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, dict) else None
    known = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    if not isinstance(name, str) or not (name in known or name.lower() in DEEPSPEED_OPTIMIZERS):
        raise CompressionError(
            f"{path}.optimizer.type: {shown(name)} is not allowed{did_you_mean(name, known)}: should be "
            f"one of DeepSpeed's ({', '.join(DEEPSPEED_OPTIMIZERS)}) or of torch.optim"
        )
    _refuse_auto({key: value for key, value in ds_config.items() if key not in SET_APART}, path)


SET_APART = "ds_compress", "pipeline"
"""Keys below which "auto" means something."""


def _refuse_auto(value: Any, path: str) -> None:
    """Refuse "auto", at any depth."""
    if value == "auto":
        raise CompressionError(
            f"{path}: 'auto' is not allowed: Trainer and accelerate would put a value there, DeepSpeed does "
            "not; give one"
        )
    for key, below in value.items() if isinstance(value, dict) else ():
        _refuse_auto(below, f"{path}.{shown_key(key)}")


def zero_stage(ds_config: dict[str, Any]) -> Any:
    """Return the ZeRO stage that a DeepSpeed config asks for."""
    zero = ds_config.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, dict) else 0


def check_length(config: PretrainedConfig, length: int) -> None:
    """Refuse sequences that are longer than the model's table of positions.

    Rotary positions beyond it would be computed, but the model has not learned them.

    Raises:
        CompressionError: `length` tokens are too many.
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(most, int) and isinstance(factor := rope.get("factor"), (int, float)):
        most = int(most * max(factor, 1))
    if isinstance(most, int) and 0 < most < length:
        raise CompressionError(
            f"{NAME}.sequence_length: {length} is not allowed: the model's config.json has "
            f'"max_position_embeddings" for {most} tokens; should be at most that'
        )


def check_tokens(config: PretrainedConfig, sequences: np.ndarray, tokenizer: str) -> None:
    """Refuse token ids, of any shape, that are not in the model's vocabulary.

    Raises:
        CompressionError: the tokenizer has made one.
    """
    largest = int(sequences.max())
    size = config.get_text_config().vocab_size
    if largest >= size:
        raise CompressionError(
            f"{NAME}.tokenizer: {tokenizer}: it made a token {largest}, but the model's vocabulary has "
            f"{size}; should be the tokenizer that the model was trained with"
        )
