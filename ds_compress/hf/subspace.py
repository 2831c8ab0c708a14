"""The pairs of layers that a run with "subspace" trained at its cuts, beside the merged model; and how they
come to lie between its layers again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_compress.engine.subspace import Linear
from ds_compress.errors import CompressionError
from ds_compress.hf.skeleton import layer_list

FILE = "subspace.safetensors"
"""Of pairs, in the folder of a merged model."""
NARROW, WIDEN = "narrow", "widen"
BEFORE_LAYERS = 2
"""Parts of a model in front of its layers, as `places` has them."""


def number_with_pairs(number: int, cuts: Sequence[int]) -> int:
    """Of a part in a pipeline that has a pair at each of `cuts`."""
    return number + 2 * sum(cut <= number for cut in cuts)


def save(checkpoint: Path, cuts: Sequence[int], to: Path) -> None:
    """Write the pairs of a run to the folder `to`.

    Args:
        checkpoint: of the run, as DeepSpeed wrote it.
        cuts: numbers of the parts that begin its stages, the first one left out.

    Raises:
        CompressionError: the checkpoint has no pair there.
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
                found[f"{cut - 1 - BEFORE_LAYERS}.{name}.{key}"] = tensor.float().contiguous()
    save_file(found, to / FILE, metadata={"format": "pt"})


def restore(model: Any, folder: str | Path) -> Any:
    """Put the pairs of a merged run between the layers of `model`, so that it computes what the pipeline did.

    Args:
        model: of Transformers, loaded from `folder`; or from what the run began with, and of peft, with the
            adapters.
        folder: that `ds-compress merge` wrote.

    Returns:
        `model` itself. Its own `save_pretrained` does not write the pairs.

    Raises:
        CompressionError: no pairs are there.
    """
    file = Path(folder, FILE)
    if not file.exists():
        raise CompressionError(f'{folder}: {FILE} is missing; should be a run with "subspace", merged')
    stored = load_file(file)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers: Any = base.get_submodule(layer_list(base))
    for number in sorted({int(name.partition(".")[0]) for name in stored}):
        parameter = next(layers[number].parameters())
        pair = nn.Sequential(*(_linear(stored, f"{number}.{name}") for name in (NARROW, WIDEN)))
        layers[number].register_forward_hook(_Through(pair.to(parameter.device).requires_grad_(False)))
    return model


def _linear(stored: dict[str, Tensor], name: str) -> Linear:
    return Linear(stored[f"{name}.weight"], stored[f"{name}.bias"])


class _Through:
    """Of a layer's output the hidden state goes through a pair."""

    def __init__(self, pair: nn.Module):
        self.pair = pair

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.pair(output[0]), *output[1:])
        return self.pair(output)
