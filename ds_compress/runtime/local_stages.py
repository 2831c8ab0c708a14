"""Build the stages of a pipeline in one process, and cut them as a `PipelineModule` does."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from ds_compress.errors import CompressionError, failures_at

Layer = Callable[[Any], Any]


class Stages:
    """The stages of a pipeline, all in this process."""

    def __init__(
        self,
        specs: Sequence[Any],
        stages: int | Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ):
        """
        Args:
            specs: what `PipelineModule` takes: LayerSpecs, modules, functions.
            stages: their number, cut by DeepSpeed's default, equal numbers of trained parameters; or where
                they begin and end: [0, 3, 6].
            device: device of all stages.
            dtype: of all floating-point parameters; None: unchanged.

        Raises:
            CompressionError: something else than a layer, or fewer layers than stages.
        """
        tied: dict[str, nn.Module] = {}
        built = []
        for number, spec in enumerate(specs):
            with failures_at(f"layer {number}"):
                built.append(_built(spec, number, tied))
        modules = nn.ModuleList(module for module, _ in built if module is not None)
        self.modules = modules.to(device=device, dtype=dtype).train()
        layers = [layer for _, layer in built]
        sizes = [
            sum(p.numel() for p in module.parameters() if p.requires_grad) if module is not None else 0
            for module, _ in built
        ]
        bounds = _bounds(sizes, stages) if isinstance(stages, int) else stages
        self._stages = [layers[start:end] for start, end in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[list[Layer]]:
        return iter(self._stages)


def _built(spec: Any, number: int, tied: dict[str, nn.Module]) -> tuple[nn.Module | None, Layer]:
    """Return the module of a layer, if it has one, and the function to call."""
    if isinstance(spec, TiedLayerSpec):
        module = tied[spec.key] = tied[spec.key] if spec.key in tied else spec.build()
        return module, partial(spec.forward_fn, module) if spec.forward_fn else module
    if isinstance(spec, LayerSpec):
        module = spec.build()
        return module, module
    if not callable(spec) or isinstance(spec, (type, PipelineModule)):
        what = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
        raise CompressionError(
            f"layer {number} is {what}; should be a LayerSpec, a module, or a function of its input"
        )
    return (spec if isinstance(spec, nn.Module) else None), spec


def _bounds(sizes: Sequence[int], stages: int) -> list[int]:
    """Return where stages begin and end, as partition_method "parameters" has it."""
    bounds = [int(bound) for bound in partition_balanced(weights=list(sizes), num_parts=stages)]
    if len(sizes) < stages or any(start == end for start, end in pairwise(bounds)):
        raise CompressionError(
            f"stages: {stages} is not allowed: equal numbers of parameters leave a stage without any of the "
            f"{len(sizes)} layers; use fewer stages, or more layers"
        )
    return bounds
