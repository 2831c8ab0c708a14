"""The structure of a Transformers model: which modules run before, in and after its layers.

The layer path leads from the model to its list of layers. Modules beside it that have parameters are side
modules (embedding, norms, head); modules without parameters (rotary tables, dropout) stay in every part. A
forward pass of a tiny model of the same class shows which side modules run before the layers.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ds_compress.errors import CompressionError
from ds_compress.hf.quantized import fix_skipped_modules, prepare_quantization


class Passthrough(nn.Module):
    """Replace a module that a part does not have: return the first argument, or zeros for an embedding.

    Plain attributes of the replaced module are kept, as some models ask their layers which kind they are.
    """

    def __init__(self, replaced: nn.Module, dtype: torch.dtype, outputs: int = 0):
        """
        Args:
            replaced: the module.
            dtype: of the model's hidden states.
            outputs: length of the tuple that `replaced` returns; 0 if it returns a tensor.
        """
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | str | None):
                setattr(self, name, value)
        self._zeros = dtype if isinstance(replaced, nn.Embedding) else None
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in a tuple where the replaced module returns one."""
        first: Tensor = args[0] if args else next(iter(kwargs.values()))
        if self._outputs:
            return (first, *[None] * (self._outputs - 1))
        if self._zeros is None:
            return first
        return torch.zeros(*first.shape, 1, dtype=self._zeros, device=first.device)


@dataclass(frozen=True)
class ModelStructure:
    """Paths of modules in a model."""

    layers: str
    """The list of layers."""
    embedding: str
    """The embedding of tokens."""
    before: tuple[str, ...]
    """Side modules that run between the embedding and the first layer."""
    after: tuple[str, ...]
    """Side modules that run after the last layer, the head among them."""
    layer_outputs: int
    """Length of the tuple that a layer returns; 0 if it returns a tensor."""


def find_structure(model: PreTrainedModel) -> ModelStructure:
    """Find which side modules run before and after the layers, in a forward pass of the whole model.

    Raises:
        CompressionError: the layers do not run once each, one after the other.
    """
    layers = find_layer_list(model)
    beside, each = find_side_modules(model, layers), list(model.get_submodule(layers).children())
    ran: list[str] = []
    returned: list[Any] = []

    def record_output(module: nn.Module, args: Any, output: Any) -> None:
        ran.append("")
        returned.append(output)

    hooks = [
        module.register_forward_pre_hook(lambda module, args, path=path: ran.append(path))
        for path, module in {**beside, layers: each[0]}.items()
    ]
    hooks.append(each[-1].register_forward_hook(record_output))
    with torch.no_grad():
        ids = torch.randint(model.config.vocab_size, (1, 8), dtype=torch.int64, device="cpu")
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    if ran.count(layers) != 1 or ran.count("") != 1:
        raise CompressionError("its layers do not run once each")
    first, end = ran.index(layers), ran.index("")
    before, between, after = ran[:first], ran[first + 1 : end], ran[end + 1 :]
    embedding = next((path for path, module in beside.items() if module is model.get_input_embeddings()), "")
    twice = [path for path in beside if (path in before) + (path in between) + (path in after) > 1]
    if between or twice:
        raise CompressionError(f"{(between + twice)[0]} runs among its layers, not only before or after them")
    if not embedding:
        raise CompressionError("its embedding of tokens is inside another module, not beside the layers")
    if embedding not in before:
        raise CompressionError(f"its embedding {embedding} does not run before its layers")
    unique = tuple(dict.fromkeys(path for path in before if path != embedding))
    outputs = len(returned[0]) if isinstance(returned[0], tuple) else 0
    return ModelStructure(layers, embedding, unique, tuple(dict.fromkeys(after)), outputs)


def find_layer_list(model: PreTrainedModel) -> str:
    """Return the path of the list of layers: of `base_model_pp_plan`, where the config has one.

    Raises:
        CompressionError: no list has as many modules as the config has layers, or more than one has.
    """
    count = model.config.num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    planned = [f"{model.base_model_prefix}.{name}" for name in model.config.base_model_pp_plan or ()]
    lists = [name for name in lists if name in planned] or lists
    depth = min((name.count(".") for name in lists), default=0)
    shallow = [name for name in lists if name.count(".") == depth]
    if len(shallow) != 1:
        raise CompressionError(f"its list of {count} layers is not found: {shallow or 'none'}")
    return shallow[0]


def find_side_modules(model: PreTrainedModel, layers: str) -> dict[str, nn.Module]:
    """Return the modules with parameters beside the path to `layers`, by path."""
    names = layers.split(".")
    layer_path = [".".join(names[:length]) for length in range(len(names))]
    found = {}
    for path in layer_path:
        for name, child in model.get_submodule(path).named_children():
            full = f"{path}.{name}".lstrip(".")
            if full not in (*layer_path, layers) and next(child.parameters(), None) is not None:
                found[full] = child
    return found


def find_tied_head(model: PreTrainedModel, structure: ModelStructure) -> str | None:
    """Return the path of the head if its weight is that of the embedding, else None.

    Raises:
        CompressionError: other weights are tied too.
    """
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    expected = {f"{path}.weight": f"{structure.embedding}.weight" for path in structure.after}
    if not set(tied.items()) <= set(expected.items()):
        raise CompressionError(f"its tied weights are not supported: {tied}")
    heads = [name.removesuffix(".weight") for name in tied]
    return heads[0] if heads else None


class ModelTemplate:
    """Build models in which all modules but a few are replaced by `Passthrough`.

    Parameters are on the meta device. Tables that the model computes from its config, such as rotary ones,
    are real.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        structure: ModelStructure,
        quantizer: HfQuantizer | None = None,
    ):
        self.dtype, self.quantizer = dtype, quantizer
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        with torch.no_grad():  # `from_config` computes tables in the dtype of the weights
            for module in model.modules():
                if next(module.buffers(recurse=False), None) is not None:
                    model._init_weights(module)
        if quantizer:
            fix_skipped_modules(quantizer, model)
        self.structure = structure
        self.tied_head = find_tied_head(model, structure)
        layers = model.get_submodule(structure.layers)
        self.layer_paths = [f"{structure.layers}.{number}" for number in range(len(layers))]
        side_modules = find_side_modules(model, structure.layers)
        self._modules: dict[str, nn.Module] = dict(zip(self.layer_paths, layers.children())) | side_modules
        for path, module in self._modules.items():
            outputs = 0 if path in side_modules else structure.layer_outputs
            model.set_submodule(path, Passthrough(module, dtype, outputs))
        self._model = model

    def build(self, paths: tuple[str, ...]) -> PreTrainedModel:
        """Build a model that has the modules at `paths`, on the meta device, and no other parameters."""
        model = copy.deepcopy(self._model)
        for path in paths:
            model.set_submodule(path, copy.deepcopy(self._modules[path]))
        if self.quantizer:  # here, as modules of bitsandbytes on the meta device cannot be copied
            prepare_quantization(model, self.quantizer, self.dtype)
        return model

    def count_parameters(self) -> dict[str, int]:
        """Return the number of parameters of each layer and side module, by path."""
        return {path: sum(p.numel() for p in module.parameters()) for path, module in self._modules.items()}
