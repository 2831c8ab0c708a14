"""A Transformers model on the meta device, taken apart: trunk, embedding, layers, and what runs before and
after them.

The trunk is the path from the model to its list of layers. What hangs on it and has parameters is a limb; a
limb that has none (rotary tables, dropout) stays in every part. Which limbs run before the layers and which
after them is seen in a forward pass of a small model of the same class.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ds_compress.errors import CompressionError
from ds_compress.hf.hollow import Hollow


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights. Tables that it computes from its config, such as rotary ones, are real."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


@dataclass(frozen=True)
class Anatomy:
    """Paths of modules in a model."""

    layers: str
    """Its list of layers."""
    embedding: str
    before: tuple[str, ...]
    """Limbs that run between the embedding and the first layer."""
    after: tuple[str, ...]
    """Limbs that run after the last layer, what makes logits among them."""
    members: int
    """Length of the tuple that a layer returns; 0 where it returns a tensor."""


def layer_list(model: PreTrainedModel) -> str:
    """Path of the list of layers.

    Raises:
        CompressionError: there is none, or more than one that could be meant.
    """
    count = model.config.num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    depth = min((name.count(".") for name in lists), default=0)
    shallow = [name for name in lists if name.count(".") == depth]
    if len(shallow) != 1:
        raise CompressionError(f"its list of {count} layers is not found: {shallow or 'none'}")
    return shallow[0]


def limbs(model: PreTrainedModel, layers: str) -> dict[str, nn.Module]:
    """What hangs on the trunk and has parameters, by path."""
    steps = layers.split(".")
    trunk = [".".join(steps[:length]) for length in range(len(steps))]
    found = {}
    for path in trunk:
        for name, child in model.get_submodule(path).named_children():
            full = f"{path}.{name}".lstrip(".")
            if full not in (*trunk, layers) and next(child.parameters(), None) is not None:
                found[full] = child
    return found


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` where `path` leads."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def tied_head(model: PreTrainedModel, anatomy: Anatomy) -> str | None:
    """Path of the module that makes logits with the embedding's weight, or None.

    Raises:
        CompressionError: other weights are tied too.
    """
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    expected = {f"{path}.weight": f"{anatomy.embedding}.weight" for path in anatomy.after}
    if not set(tied.items()) <= set(expected.items()):
        raise CompressionError(f"its tied weights are not supported: {tied}")
    heads = [name.removesuffix(".weight") for name in tied]
    return heads[0] if heads else None


class Skeleton:
    """Builds models with all but some of their modules hollowed out.

    Holds no weights: everything is on the meta device but the tables that the trunk computes with.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, anatomy: Anatomy):
        model = meta_model(config, dtype)
        self.config, self.dtype, self.anatomy = config, dtype, anatomy
        self.tied = tied_head(model, anatomy)
        self._layers = list(model.get_submodule(anatomy.layers).children())
        self._limbs = limbs(model, anatomy.layers)
        for path in self._limbs:
            replace(model, path, Hollow(self._limbs[path], dtype))
        for path, layer in zip(self.layer_paths, self._layers):
            replace(model, path, Hollow(layer, dtype, anatomy.members))
        self._trunk = model

    @property
    def layer_paths(self) -> list[str]:
        return [f"{self.anatomy.layers}.{number}" for number in range(len(self._layers))]

    def with_only(self, paths: tuple[str, ...]) -> PreTrainedModel:
        """A model that has these modules, on the meta device, and nothing else with parameters."""
        model = copy.deepcopy(self._trunk)
        modules = dict(zip(self.layer_paths, self._layers)) | self._limbs
        for path in paths:
            replace(model, path, copy.deepcopy(modules[path]))
        return model

    def sizes(self) -> dict[str, int]:
        """Number of parameters by path of a layer or limb."""
        modules: dict[str, Any] = dict(zip(self.layer_paths, self._layers)) | self._limbs
        return {path: sum(p.numel() for p in module.parameters()) for path, module in modules.items()}
