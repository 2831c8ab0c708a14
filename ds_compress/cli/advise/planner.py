"""Plan for `ds-compress advise`: compute times, network, memory, and the recipes to compare.

For a train.json, memory, compute times and messages follow from the config of its model.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_compress.cli.advise.from_args import evaluate_from_args, message_spec
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.check import read_block
from ds_compress.cli.console import importing_deepspeed
from ds_compress.codec import TensorSpec, bytes_of
from ds_compress.config import KEY, Config
from ds_compress.config.recipes import ErrorLimits, recipe
from ds_compress.errors import CompressionError, errors_at
from ds_compress.planning import choice
from ds_compress.planning.choice import Candidate, PipelineRecipe
from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import LinkSpeed, Workload
from ds_compress.replicas.slices import slice_numel

if TYPE_CHECKING:
    from ds_compress.hf.footprint import StageFootprint


def list_recipes(
    args: argparse.Namespace,
    files: Mapping[str, Any],
    footprint: "Sequence[StageFootprint]",
    network: LinkSpeed,
    limits: ErrorLimits,
) -> list[PipelineRecipe]:
    """Return the recipes to compare, the baseline first.

    Args:
        files: blocks to compare, by name; if there are none: all candidates, and mixtures within `limits`.
        footprint: of each stage, where it was predicted.
    """
    spec, boundaries, found = message_spec(args), args.stages - 1, list[PipelineRecipe]()
    # values of a trained weight that two stages share
    tied = args.tied or max((own.tied_values for own in footprint), default=0)
    itemsize = 2 if args.dtype == "fp16" else 4  # bf16 is added up in fp32
    for name, block in files.items():
        with errors_at(f"recipe {name}"):
            own = Config(block).block.link
            evaluation = evaluate_from_args(Candidate(name, block, is_separable=False), args)
        budgets = _budgets(args, footprint, own.memory_gb)
        link = {"eager": own.mode == "eager", "depth": own.depth, "budgets": budgets}
        built = choice.build_recipe(name, [evaluation] * boundaries, link)
        found.append(replace(built, exchanged=exchanged_bytes(block, tied, itemsize)))
    if not files:
        evaluations = [
            evaluate_from_args(candidate, args)
            for candidate in choice.candidates_for(args.quality)
            if not any(codec.refuses(spec) for codec, _ in Config(candidate.block).in_force.pairs())
        ]
        link = {"eager": True, "depth": args.depth, "budgets": _budgets(args, footprint)}
        found = choice.combine([evaluations] * boundaries, [network] * boundaries, limits, **link)
        if tied:
            of_quality = {"tied": recipe(args.quality, KEY).get("tied", {})}
            sent = exchanged_bytes(of_quality, tied, itemsize)
            found = [replace(own, block={**own.block, **of_quality}, exchanged=sent) for own in found]
    usable = [recipe for recipe in found if math.isfinite(max(recipe.errors))]
    raw_bytes = [spec.nbytes] * boundaries
    stock = choice.uncompressed_recipe(raw_bytes, raw_bytes)
    return [replace(stock, exchanged=exchanged_bytes({}, tied, itemsize)), *usable]


def exchanged_bytes(block: dict[str, Any], values: int, itemsize: int) -> int:
    """Return the bytes that each of two stages sends in a step to sum the gradients of a tied weight.

    Args:
        block: of the recipe.
        values: of the weight.
        itemsize: bytes per value without a codec for tied weights.
    """
    codec = Config(block).tied_codec if values else None
    if codec is None:
        return itemsize * values
    half = TensorSpec((slice_numel(values, 2),), torch.float32)
    return 2 * bytes_of(codec.layout(half))


def _budgets(
    args: argparse.Namespace, footprint: "Sequence[StageFootprint]", memory_gb: float | None = None
) -> tuple[MemoryBudget, ...]:
    """Return the memory budget of each stage; `memory_gb`: the limit in the block of a recipe."""
    whole, of_block = (math.inf if own is None else own * 1e9 for own in (args.memory_gb, memory_gb))
    # as with activation checkpointing
    activation_bytes, fixed = [float(message_spec(args).nbytes)] * args.stages, [0] * args.stages
    if footprint:
        activation_bytes = [float(own.activations) for own in footprint]
        fixed = [own.parameters + own.trained + own.working for own in footprint]
    if args.activation_mb is not None:
        activation_bytes = [args.activation_mb * 1e6] * args.stages
    limits = [min(whole - taken, of_block) for taken in fixed]
    return tuple(MemoryBudget(own, limit=limit) for own, limit in zip(activation_bytes, limits))


def workload_from(args: argparse.Namespace) -> Workload:
    """Return the workload that options give.

    Raises:
        CompressionError: an option is missing, or its numbers do not fit the stages.
    """
    measured = '; "recipe": "auto" measures it in a run'
    for name, more in {"stages": "", "micro_batches": "", "forward_ms": measured, "shape": measured}.items():
        if getattr(args, name) is None:
            option = f"--{name.replace('_', '-')}"
            raise CompressionError(
                f"{option}: missing; give it, or --finetune, whose train.json says it{more}"
            )
    if args.stages < 2:
        raise CompressionError(f"--stages: {args.stages} is not allowed: should be 2 or more")
    forward = _per_stage("--forward-ms", args.forward_ms, args.stages)
    backward = args.backward_ms or [2 * ms for ms in args.forward_ms]
    both = forward, _per_stage("--backward-ms", backward, args.stages)
    return Workload(*both, args.micro_batches, args.step_ms / 1e3)


def _per_stage(option: str, milliseconds: list[float], stages: int) -> tuple[float, ...]:
    if len(milliseconds) not in (1, stages):
        raise CompressionError(
            f"{option}: {len(milliseconds)} numbers for {stages} stages; give 1 or {stages}"
        )
    return tuple(ms / 1e3 for ms in milliseconds * (stages // len(milliseconds)))


def read_recipe_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Read the blocks of `--recipe`, by name, as they are written.

    Raises:
        CompressionError: a file is bad, or two files share a name.
    """
    blocks = {path.stem: read_block(path) for path in paths}
    if len(blocks) < len(paths):
        raise CompressionError("--recipe: two files have the same name; rename one of them")
    return blocks


def predict_run(args: argparse.Namespace) -> "list[StageFootprint]":
    """Predict the stages of the run that `--finetune` names, and set the options that it replaces.

    Raises:
        CompressionError: train.json or an option is wrong, or a stage does not fit into the memory.
    """
    if args.stages or args.shape or args.micro_batches:
        raise CompressionError(
            "--stages, --shape, --micro-batches: not allowed with --finetune, whose train.json says them"
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
        from ds_compress.hf.settings import read_settings
        from ds_compress.hf.transformers_pipeline import read_config
    except ImportError as error:
        raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
    settings = read_settings(args.finetune)
    config = read_config(Path(settings.model))
    found = predict_footprint(settings, config)
    sequences, args.micro_batches = settings.batch_sizes
    args.shape = (sequences, settings.lengths[-1], config.get_text_config().hidden_size)
    stored = next((name for name, dtype in DTYPES.items() if dtype == config.dtype), "fp32")
    args.dtype = args.dtype or settings.dtype or stored
    return found
