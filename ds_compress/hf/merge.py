"""A run of `ds_compress.hf.finetune` as an ordinary Transformers checkpoint, and its adapters for peft.

One part of the model is in memory at a time: its weights are read, what was trained is put in, and a file of
the new checkpoint is written.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ds_compress.errors import CompressionError
from ds_compress.hf import subspace as pairs
from ds_compress.hf.model import LoadedPart, layer_specs
from ds_compress.hf.settings import NAME, read
from ds_compress.hf.skeleton import replace
from ds_compress.hf.weights import INDEX

LATEST = "latest"
"""File that names the last complete checkpoint."""
ADAPTER = "adapter"
"""Folder of the adapters, beside the merged weights."""
FORMAT = {"format": "pt"}
PART = "part-{}"
"""File of a shard until all are written."""


def merge(run: Path, to: Path) -> None:
    """Write what `run` trained last to `to`. The pairs of layers of a run with "subspace", which no ordinary
    checkpoint has a place for, go into a file beside it.

    Raises:
        CompressionError: `run` is no finished or interrupted run, or `to` is not empty.
    """
    settings, checkpoint = read(run / NAME), latest(run)
    if to.exists() and any(to.iterdir()):
        raise CompressionError(f"--to {to}: the folder is not empty")
    to.mkdir(parents=True, exist_ok=True)
    model = Path(settings.model)
    lora = settings.lora.config(settings.model) if settings.lora else None
    stages = settings.stages if settings.subspace else 1
    specs, bounds = layer_specs(model, stages, lora, None, False, settings.seed)
    cuts = bounds[1:-1] if settings.subspace else []
    adapters: dict[str, Tensor] = {}
    shards: list[list[str]] = []  # names of their tensors
    size = 0
    for part in _parts(specs, checkpoint, cuts, settings.lora is not None):
        adapters |= adapter_of(part)
        tensors = plain(part)
        if tensors:
            save_file(tensors, to / PART.format(len(shards)), metadata=FORMAT)
            shards.append(list(tensors))
        size += sum(tensor.nbytes for tensor in tensors.values())
    places: dict[str, str] = {}
    for number, names in enumerate(shards):  # only now is it known how many there are
        shard = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (to / PART.format(number)).rename(to / shard)
        places |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (to / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for folder in (model, Path(settings.tokenizer or settings.model)):
        for file in folder.iterdir():
            if file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith("index.json"):
                shutil.copyfile(file, to / file.name)
    if cuts:
        pairs.save(checkpoint, cuts, to)
    if lora:
        lora.save_pretrained(str(to / ADAPTER))
        save_file(adapters, to / ADAPTER / "adapter_model.safetensors", metadata=FORMAT)


def latest(run: Path) -> Path:
    """The folder of the last complete checkpoint.

    Raises:
        CompressionError: there is none.
    """
    try:
        return run / (run / LATEST).read_text().strip()
    except OSError:
        raise CompressionError(f"{run}: no complete checkpoint: {LATEST} is missing") from None


def _parts(specs: list[LayerSpec], checkpoint: Path, cuts: list[int], frozen: bool) -> Iterator[LoadedPart]:
    """Every part as it was trained; the embedding of a tied model comes once, its head then has none.

    `cuts`: where the pipeline has pairs of layers between the parts."""
    for number, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec) and number > 0:
            continue
        part: LoadedPart = spec.build()
        stored = sorted(checkpoint.glob(f"layer_{pairs.number_with_pairs(number, cuts):02}-*model_states.pt"))
        if not stored:
            raise CompressionError(f"{checkpoint}: layer {number} of the pipeline is missing")
        trained = torch.load(stored[0], map_location="cpu", weights_only=True)
        part.load_state_dict(trained, strict=not frozen)
        yield part


def adapter_of(part: LoadedPart) -> dict[str, Tensor]:
    """Its adapters, by the names that peft gives them."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": parameter.detach().cpu().contiguous()
        for name, parameter in part.model.named_parameters()
        if ".lora_" in name
    }


def _merged(module: Any) -> nn.Module:
    """What an adapted module is without its adapters, which are added to it."""
    if isinstance(module, ParamWrapper):  # of experts: one may hold another
        unwrapped: nn.Module = module.unload_and_optionally_merge_module(True, False, None)
        return unwrapped
    module.merge()
    base: nn.Module = module.get_base_layer()
    return base


def plain(part: LoadedPart) -> dict[str, Tensor]:
    """Its weights, adapters added to them, by the names and in the form of the checkpoint on disk."""
    outermost = {name: m for name, m in part.model.named_modules() if isinstance(m, LoraLayer)}
    for name in [name for name in outermost if not any(name.startswith(f"{o}.") for o in outermost)]:
        replace(part.model, name, _merged(outermost[name]))
    tied = f"{part.tied_head}.weight"
    state: dict[str, Any] = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in part.model.state_dict().items()
        if name != tied
    }
    reverted = revert_weight_conversion(part.model, state)
    return {name: tensor.clone().contiguous() for name, tensor in reverted.items()}
