"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in a part, by peft."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_compress.errors import CompressionError, shown
from ds_compress.hf.part import EMBEDDING, KINDS, LAYER, Part
from ds_compress.hf.structure import Passthrough

LINEAR = (nn.Linear, Conv1D)
"""Modules that peft adapts."""


def check_lora(config: LoraConfig) -> None:
    """Refuse options that do not adapt every layer alike.

    Raises:
        CompressionError: such an option is set.
    """
    for name in ("modules_to_save", "layers_to_transform", "target_parameters", "trainable_token_indices"):
        if getattr(config, name, None):
            raise CompressionError(
                f"lora.{name}: {shown(getattr(config, name))} is not allowed: every layer is adapted alike, "
                "in modules that lora.target_modules names"
            )
    if isinstance(config.exclude_modules, str):
        raise CompressionError(
            f"lora.exclude_modules: {shown(config.exclude_modules)} is not allowed: should be a list of names"
        )


def add_adapters(part: Part, config: LoraConfig, seed: int) -> None:
    """Freeze `part` and put fp32 adapters into it, whatever its dtype; `config` is changed.

    Initial weights follow from `seed` and the part's id, so they do not depend on where the model is cut.

    Raises:
        CompressionError: a layer has none of the modules to adapt; or the head is among them and shares its
            weight with the embedding.
    """
    part.requires_grad_(False)
    replaced = [name for name, module in part.model.named_modules() if isinstance(module, Passthrough)]
    config.exclude_modules = [*(config.exclude_modules or ()), *replaced]
    linear = {
        name.rpartition(".")[2] for name, module in part.model.named_modules() if isinstance(module, LINEAR)
    }
    if part.part_id.kind == EMBEDDING or (part.part_id.kind != LAYER and not linear):
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed + KINDS.index(part.part_id.kind) + len(KINDS) * part.part_id.layer)
        try:
            inject_adapter_in_model(config, part.model)
        except ValueError as error:  # the part has no module of these names
            if part.part_id.kind == LAYER:
                why = " ".join(str(error).split())
                raise CompressionError(
                    f"lora.target_modules: {part.part_id}: {why}; it has: {', '.join(sorted(linear))}"
                ) from None
    if part.tied_head and any(f"{part.tied_head}.lora_" in name for name, _ in part.model.named_parameters()):
        raise CompressionError(
            f"lora.target_modules: {part.tied_head!r} is not allowed: its weight is the embedding's too"
        )
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
