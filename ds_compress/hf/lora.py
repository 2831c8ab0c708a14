"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in a part, by peft."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_compress.errors import CompressionError, shown
from ds_compress.hf.part import EMBEDDING, KINDS, LAYER, Part

LINEAR = (nn.Linear, Conv1D)


def check(config: LoraConfig) -> None:
    """Refuse what would change more than the layers.

    Raises:
        CompressionError: for such an option.
    """
    for name in ("modules_to_save", "layers_to_transform", "target_parameters", "trainable_token_indices"):
        if getattr(config, name, None):
            raise CompressionError(
                f"lora.{name}: {shown(getattr(config, name))} is not allowed: every layer is adapted alike, "
                "in modules that lora.target_modules names"
            )


def adapt(part: Part, config: LoraConfig, seed: int) -> None:
    """Freeze `part` and put adapters in it, in fp32, whatever dtype it has.

    Adapters start alike wherever the model is cut: from `seed` and the place of the part.

    Raises:
        CompressionError: a layer has none of the modules that are to be adapted; or a head is to be adapted
            whose weight is the embedding's.
    """
    part.requires_grad_(False)
    linear = {
        name.rpartition(".")[2] for name, module in part.model.named_modules() if isinstance(module, LINEAR)
    }
    if part.place.kind == EMBEDDING or (part.place.kind != LAYER and not linear):
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed + KINDS.index(part.place.kind) + len(KINDS) * part.place.layer)
        try:
            inject_adapter_in_model(config, part.model)
        except ValueError as error:  # none of its modules is meant
            if part.place.kind == LAYER:
                why = " ".join(str(error).split())
                raise CompressionError(
                    f"lora.target_modules: {part.place}: {why}; it has: {', '.join(sorted(linear))}"
                ) from None
    if part.tied_head and any(f"{part.tied_head}.lora_" in name for name, _ in part.model.named_parameters()):
        raise CompressionError(
            f"lora.target_modules: {part.tied_head!r} is not allowed: its weight is the embedding's too"
        )
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
