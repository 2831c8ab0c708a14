"""One part of a Transformers model as a layer of a pipeline: the whole model with all else hollowed out.

Its forward pass is the model's own, so masks, rotary tables and scales are made anew inside each part, from
the shape and dtype of what it receives. That arrives where its layer is called, whatever the model did to
its inputs before; what the layer returns leaves.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_compress.errors import CompressionError
from ds_compress.hf.skeleton import Skeleton

KINDS = EMBEDDING, BEFORE, LAYER, AFTER = "embedding", "before", "layer", "after"


class Place(NamedTuple):
    """Which part of a model: kind, and number of the layer where it is one."""

    kind: str
    layer: int = 0

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.kind == LAYER else self.kind


def places(layers: int) -> list[Place]:
    """Of all parts in their order."""
    return [Place(EMBEDDING), Place(BEFORE), *(Place(LAYER, n) for n in range(layers)), Place(AFTER)]


def own_paths(skeleton: Skeleton, place: Place) -> tuple[str, ...]:
    """Of the modules that a part has."""
    anatomy = skeleton.anatomy
    if place.kind == LAYER:
        return (skeleton.layer_paths[place.layer],)
    return {EMBEDDING: (anatomy.embedding,), BEFORE: anatomy.before, AFTER: anatomy.after}[place.kind]


class Part(nn.Module):
    """Takes and gives hidden states [batch, length, width], or a tuple of them and positions [batch, length]
    int64, that restart at zero with each document. The first part takes token ids [batch, length] int64 in
    their place, the last one gives logits [batch, length, vocabulary] alone.

    `model`'s parameters have the names that they have in the whole model; they start on the meta device.
    """

    def __init__(self, skeleton: Skeleton, place: Place):
        super().__init__()
        self.place = place
        self.model = skeleton.with_only(own_paths(skeleton, place))
        self.tied_head = skeleton.tied if place.kind == AFTER else None
        self._embedding = skeleton.anatomy.embedding
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        last = len(skeleton.layer_paths) - 1
        entered = {BEFORE: 0, LAYER: place.layer, AFTER: last}.get(place.kind)
        if entered is not None:
            layer = self.model.get_submodule(skeleton.layer_paths[entered])
            if place.kind != BEFORE:
                layer.register_forward_pre_hook(self._arrive, with_kwargs=True)
            layer.register_forward_hook(self._leave)

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the layer what this part received, in the place of what the model made of it."""
        if args:
            return (self._arriving, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._arriving}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leaving = output[0] if isinstance(output, tuple) else output

    def forward(self, inputs: Any) -> Any:
        x, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        x = self._run(x, positions)
        return x if positions is None or self.place.kind == AFTER else (x, positions)

    def _run(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if self.place.kind == EMBEDDING:
            x = self.model.get_submodule(self._embedding)(x)
            # Where it is frozen, re-entrant checkpointing after it would find nothing to differentiate
            return x.requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x
        self._arriving = x
        embedded = x if self.place.kind == BEFORE else x.detach()  # only its shape and dtype count
        positioned = {} if positions is None else {"position_ids": positions}
        try:
            output = self.model(inputs_embeds=embedded, use_cache=False, **positioned)
            left = self._leaving
        finally:
            self._arriving = self._leaving = None
        if left is None:
            raise CompressionError(f"{self.place} of {type(self.model).__name__} was not run")
        return output.logits if self.place.kind == AFTER else left
