"""The pairs of layers that a run with "subspace" trained: writing them beside a merged model, and putting
them back between its layers."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ds_compress.engine.subspace import PairLayer
from ds_compress.errors import CompressionError
from ds_compress.hf.structure import find_layer_list

FILE = "subspace.safetensors"
"""File of the pairs, in the folder of a merged model."""
NARROW, WIDEN = "narrow", "widen"
PARTS_BEFORE_LAYERS = 2
"""Parts of a model in front of its layers, see `list_parts`."""


def number_with_pairs(number: int, cuts: Sequence[int]) -> int:
    """Return the number that a part has in a pipeline with a pair at each of `cuts`."""
    return number + 2 * sum(cut <= number for cut in cuts)


def save_pairs(checkpoint: Path, cuts: Sequence[int], to: Path) -> None:
    """Write the pairs of a run to the folder `to`.

    Args:
        checkpoint: folder that DeepSpeed wrote.
        cuts: number of the first part of each stage but the first.

    Raises:
        CompressionError: the checkpoint lacks a pair.
    """
    found = {}
    for cut in cuts:
        after = number_with_pairs(cut - 1, cuts)
        for name, number in ((NARROW, after + 1), (WIDEN, after + 2)):
            pattern = f"layer_{number:02}-*model_states.pt"
            files = [*checkpoint.glob(pattern)]
            if len(files) != 1:
                raise CompressionError(
                    f"{checkpoint}: {len(files)} files {pattern} are there, expected 1: the checkpoint is "
                    "damaged, or of a run that was cut elsewhere"
                )
            for key, tensor in torch.load(files[0], map_location="cpu", weights_only=True).items():
                found[f"{cut - 1 - PARTS_BEFORE_LAYERS}.{name}.{key}"] = tensor.float().contiguous()
    save_file(found, to / FILE, metadata={"format": "pt"})


def restore(model: Any, folder: str | Path) -> Any:
    """Put the pairs of a merged run between the layers of `model`, which then computes what the pipeline did.

    Args:
        model: a model of Transformers, loaded from `folder`; or a model of peft: the one that the run began
            with, and the adapters.
        folder: the folder that `ds-compress merge` wrote.

    Returns:
        `model` itself. Its `save_pretrained` does not write the pairs.

    Raises:
        CompressionError: `folder` has no pairs.
    """
    file = Path(folder, FILE)
    if not file.exists():
        raise CompressionError(f'{folder}: {FILE} is missing; should be a run with "subspace", merged')
    stored = load_file(file)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers: Any = base.get_submodule(find_layer_list(base))
    for number in sorted({int(name.partition(".")[0]) for name in stored}):
        parameter = next(layers[number].parameters())
        names = (f"{number}.{name}" for name in (NARROW, WIDEN))
        pair = nn.Sequential(*(PairLayer(stored[f"{name}.weight"], stored[f"{name}.bias"]) for name in names))
        pair.to(parameter.device).requires_grad_(False)
        layers[number].register_forward_hook(functools.partial(_apply, pair))
    return model


def _apply(pair: nn.Module, module: nn.Module, args: Any, output: Any) -> Any:
    """Send the hidden state that a layer returns through `pair`; a hook of the layer."""
    return (pair(output[0]), *output[1:]) if isinstance(output, tuple) else pair(output)
