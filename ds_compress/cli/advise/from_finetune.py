"""Plan for a train.json: memory, compute times and messages follow from the config of its model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.console import importing_deepspeed
from ds_compress.errors import CompressionError, errors_at

if TYPE_CHECKING:
    from ds_compress.hf.footprint import StageFootprint


def predict_run(args: argparse.Namespace) -> "list[StageFootprint]":
    """Predict the stages of the run that `--finetune` names, and set the options that it replaces.

    Raises:
        CompressionError: train.json or an option is wrong, or a stage does not fit into the memory.
    """
    if args.stages or args.shape or args.micro_batches or args.parameters:
        raise CompressionError(
            "--stages, --shape, --micro-batches, --parameters: not allowed with --finetune, whose train.json "
            "says them"
        )
    if args.tflops is None and args.forward_ms is None:
        raise CompressionError("--tflops: missing; give what your GPU reaches in training, or --forward-ms")
    with importing_deepspeed(), errors_at(f"--finetune {args.finetune}"):
        found = _predict(args)
    args.stages = len(found)
    if args.memory_gb is not None and max(own.total for own in found) > args.memory_gb * 1e9:
        needed = ", ".join(f"{own.total / 1e9:.1f}" for own in found)
        raise CompressionError(
            f"--memory-gb: {args.memory_gb:g} is too little: the stages need {needed} GB; in train.json, set "
            '"quantize": "nf4", "activation_checkpoint_interval": 1, a smaller sequence_length or more stages'
        )
    if args.forward_ms is None:
        rate = args.tflops * 1e9  # operations of a millisecond
        args.forward_ms = [own.forward_flops / rate for own in found]
        args.backward_ms = args.backward_ms or [own.backward_flops / rate for own in found]
    return found


def _predict(args: argparse.Namespace) -> "list[StageFootprint]":
    try:
        from ds_compress.hf.footprint import predict_footprint
        from ds_compress.hf.model import read_config
        from ds_compress.hf.settings import read_settings
    except ImportError as error:
        raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
    settings = read_settings(args.finetune)
    config = read_config(Path(settings.model))
    found = predict_footprint(settings, config)
    sequences, args.micro_batches = settings.batch_sizes
    args.shape = (sequences, settings.lengths[-1], config.get_text_config().hidden_size)
    stored = next((name for name, dtype in DTYPES.items() if dtype == config.dtype), "fp32")
    args.dtype = args.dtype or settings.dtype or stored
    if args.replicas:  # adapters and their gradients are fp32
        args.parameters = max(own.trained_values for own in found)
        args.gradient_dtype = "fp32" if settings.lora else args.dtype
    return found
