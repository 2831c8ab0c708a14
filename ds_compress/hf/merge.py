"""Write a run of `ds_compress.hf.finetune` as an ordinary Transformers checkpoint, and its adapters for peft.

One part of the model is in memory at a time: its weights are read, the trained values replace them, and a
file of the new checkpoint is written.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from ds_compress.checkpoint.file import save_readable
from ds_compress.errors import CompressionError, errors_at, failures_at
from ds_compress.hf.documents import list_texts
from ds_compress.hf.quantized import dequantize, make_plain
from ds_compress.hf.run_folder import LATEST, read_name
from ds_compress.hf.settings import DTYPES, NAME, Settings, read_settings
from ds_compress.hf.transformers_pipeline import LoadedPart, load_config, plan_parts
from ds_compress.hf.weights import INDEX

ADAPTER = "adapter"
"""Folder of the adapters, in the merged model's."""
FORMAT = {"format": "pt"}
"""Metadata of a safetensors file that Transformers reads."""
PART = "part-{}"
"""Name of a shard until the number of shards is known."""


def merge(run: Path, to: Path, which: str = LATEST) -> None:
    """Write a checkpoint of `run`, the last one or the best, to the folder `to`.

    Raises:
        CompressionError: `run` has no complete checkpoint, lacks layers, or was trained with other adapters;
            or `to` is not empty, or cannot be written.
    """
    settings, name = read_settings(run / NAME), read_name(run, which)
    if name is None:
        raise CompressionError(f"{run}: no complete checkpoint: {which} is missing")
    writing = f"--to {to}: cannot be written"
    with failures_at(writing):
        if to.exists() and any(to.iterdir()):
            raise CompressionError(f"--to {to}: the folder is not empty")
        to.mkdir(parents=True, exist_ok=True)
    model = Path(settings.model)
    lora = settings.lora.to_peft(settings.model) if settings.lora else None
    # the run quantized what the weights are in its dtype, which rounds some to other codes
    dtype = DTYPES[settings.dtype] if settings.quantize else None
    config = load_config(model)
    template, part_ids, _ = plan_parts(config, 1, lora, dtype, False, settings.quantize)
    written: Any = config.dtype or torch.float32
    adapters: dict[str, Tensor] = {}
    shards: list[dict[str, int]] = []
    for number, part_id in enumerate(part_ids):
        part = LoadedPart(template, part_id, model, lora, settings.seed)
        _load_trained(part, number, run / name)
        adapters |= adapter_tensors(part)
        if tensors := merged_tensors(part, written):
            with failures_at(writing):
                save_readable(tensors, to / PART.format(len(shards)), FORMAT)
            shards.append({name: tensor.nbytes for name, tensor in tensors.items()})
    with failures_at(writing):
        _name_shards(shards, to)
        _copy_configs(settings, to)
        if lora:
            lora.save_pretrained(str(to / ADAPTER))
            save_readable(adapters, to / ADAPTER / "adapter_model.safetensors", FORMAT)


def _name_shards(shards: list[dict[str, int]], to: Path) -> None:
    """Give the files of the parts their final names, and write the index of their tensors.

    Args:
        shards: of each file, the bytes of its tensors by name.
        to: folder of the files.
    """
    file_of: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        shard = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (to / PART.format(number)).rename(to / shard)
        file_of |= dict.fromkeys(tensors, shard)
    total = sum(size for tensors in shards for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (to / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_configs(settings: Settings, to: Path) -> None:
    """Copy the files of the model that hold no weights, and save the run's tokenizer if it is another: no
    file of the model's own tokenizer is then beside it."""
    other = None if settings.tokenizer in (None, settings.model) else settings.tokenizer
    for file in list_texts(Path(settings.model)):
        if not other or file.name in ("config.json", "generation_config.json"):
            shutil.copyfile(file, to / file.name)
    if other:
        AutoTokenizer.from_pretrained(other).save_pretrained(to)
    config = json.loads((to / "config.json").read_text())
    if config.pop("quantization_config", None):
        (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _load_trained(part: LoadedPart, number: int, checkpoint: Path) -> None:
    """Load what a run has trained of a part of the model, which is layer `number` of the pipeline.

    Args:
        checkpoint: folder that DeepSpeed wrote.
    """
    stored = sorted(checkpoint.glob(f"layer_{number:02}-*model_states.pt"))
    if not stored:
        raise CompressionError(
            f"{checkpoint}: layer {number} of the pipeline is missing; if the machines do not share this "
            "folder, let the run end, which copies all layers to the first machine, or copy layer_* from "
            "the same folder of the other machines"
        )
    with errors_at(str(stored[0])), failures_at("damaged"):
        part.load_state_dict(torch.load(stored[0], map_location="cpu", weights_only=True))


def adapter_tensors(part: LoadedPart) -> dict[str, Tensor]:
    """Return a part's adapters, by the names that peft gives them."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": parameter.detach().cpu().contiguous()
        for name, parameter in part.model.named_parameters()
        if ".lora_" in name
    }


def merged_tensors(part: LoadedPart, dtype: torch.dtype) -> dict[str, Tensor]:
    """Add a part's adapters to its weights; return these by the names, and in the form, of the checkpoint.

    Quantized weights become whole ones, with the values that the adapters were trained over.

    Args:
        part: with what a run has trained.
        dtype: of the weights that are written, unless the model keeps some in another.
    """
    adapted = {name: m for name, m in part.model.named_modules() if isinstance(m, LoraLayer)}
    for name in [name for name in adapted if not any(name.startswith(f"{other}.") for other in adapted)]:
        part.model.set_submodule(name, _merge_module(adapted[name], dtype))
    for name, module in list(part.model.named_modules()):
        if (weight := dequantize(module)) is not None:
            part.model.set_submodule(name, make_plain(module, weight, dtype))
    tied = f"{part.tied_head}.weight"
    state: dict[str, Any] = {
        name: (tensor.to(dtype) if tensor.dtype == part.dtype else tensor).detach().cpu().contiguous()
        for name, tensor in part.model.state_dict().items()
        if name != tied
    }
    reverted = revert_weight_conversion(part.model, state)
    return {name: tensor.clone().contiguous() for name, tensor in reverted.items()}


def _merge_module(module: Any, dtype: torch.dtype) -> nn.Module:
    """Return the module that peft adapted, with the adapters added to its weights."""
    if isinstance(module, ParamWrapper):  # of experts; it may hold another one
        unwrapped: nn.Module = module.unload_and_optionally_merge_module(True, False, None)
        return unwrapped
    base: nn.Module = module.get_base_layer()
    if (weight := dequantize(base)) is not None:  # peft would quantize the sum again
        return make_plain(base, weight + module.get_delta_weight("default").float(), dtype)
    module.merge()
    return base
