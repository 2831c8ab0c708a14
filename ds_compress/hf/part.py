"""One part of a Transformers model as a layer of a pipeline: the whole model, where `Passthrough` replaces
every module of other parts.

A part runs the model's own forward pass, so masks, rotary tables and scales are computed inside each part
from the shape and dtype of its input. Hooks give that input to the part's layer, whatever the model did to it
before, and take what the layer returns. Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) are put
into a part by peft.
"""

from typing import Any, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.pytorch_utils import Conv1D

from ds_compress.errors import CompressionError, shown
from ds_compress.hf.structure import ModelTemplate, Passthrough

KINDS = EMBEDDING, BEFORE, LAYER, AFTER = "embedding", "before", "layer", "after"


class PartId(NamedTuple):
    """Name a part of a model: its kind, and the number of a layer."""

    kind: str
    layer: int = 0

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.kind == LAYER else self.kind


def list_parts(layers: int) -> list[PartId]:
    """Return the parts of a model with so many layers, in order."""
    return [PartId(EMBEDDING), PartId(BEFORE), *(PartId(LAYER, n) for n in range(layers)), PartId(AFTER)]


def module_paths(template: ModelTemplate, part_id: PartId) -> tuple[str, ...]:
    """Return the paths of the modules that a part has."""
    structure = template.structure
    if part_id.kind == LAYER:
        return (template.layer_paths[part_id.layer],)
    return {EMBEDDING: (structure.embedding,), BEFORE: structure.before, AFTER: structure.after}[part_id.kind]


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens in nats, as Transformers' models compute it.

    Args:
        logits: [batch, length, vocabulary].
        labels: [batch, length] int64, the tokens themselves, not shifted; -100 where nothing is learned.
    """
    loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    return loss


class Part(nn.Module):
    """Run one part of a model on hidden states.

    Input and output are hidden states [batch, length, width], or a tuple of them and positions [batch,
    length] int64 that restart at zero with each document. The first part takes token ids [batch, length]
    int64 instead, the last one returns logits [batch, length, vocabulary] alone.

    Parameters of `model` have the names that they have in the whole model; they start on the meta device.
    """

    def __init__(self, template: ModelTemplate, part_id: PartId):
        super().__init__()
        self.part_id, self.dtype = part_id, template.dtype
        self.model = template.build(module_paths(template, part_id))
        self.tied_head = template.tied_head if part_id.kind == AFTER else None
        self._embedding = template.structure.embedding
        self._received: Tensor | None = None
        self._output: Tensor | None = None
        last = len(template.layer_paths) - 1
        number = {BEFORE: 0, LAYER: part_id.layer, AFTER: last}.get(part_id.kind)
        if number is not None:
            layer = self.model.get_submodule(template.layer_paths[number])
            if part_id.kind != BEFORE:
                layer.register_forward_pre_hook(self._replace_input, with_kwargs=True)
            layer.register_forward_hook(self._keep_output)

    def _replace_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the layer what this part received, not what the model made of it."""
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output[0] if isinstance(output, tuple) else output

    def forward(self, inputs: Any) -> Any:
        """Run the part; positions in `inputs` are passed on."""
        x, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        x = self._run(x, positions)
        return x if positions is None or self.part_id.kind == AFTER else (x, positions)

    def _run(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if self.part_id.kind == EMBEDDING:
            x = self.model.get_submodule(self._embedding)(x)
            # With a frozen embedding, re-entrant checkpointing after it would find nothing to differentiate
            return x.requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x
        self._received = x
        embedded = x if self.part_id.kind == BEFORE else x.detach()  # only its shape and dtype count
        options = {} if positions is None else {"position_ids": positions}
        try:
            result = self.model(inputs_embeds=embedded, use_cache=False, **options)
            output = self._output
        finally:
            self._received = self._output = None
        if output is None:
            raise CompressionError(f"{self.part_id} of {type(self.model).__name__} was not run")
        return result.logits if self.part_id.kind == AFTER else output


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
