"""What a kind of pipeline is made of: layers, micro-batches, settings."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.support.models import CopiedTurned
from tests.support.pipeline import WIDTH, batches, layers

LAYERS = 6


def of(layer: type) -> list[LayerSpec]:
    """Layers of a class that has to know which is the last."""
    return [LayerSpec(layer) for _ in range(LAYERS - 1)] + [LayerSpec(layer, last=True)]


def turned(layer: type) -> list[LayerSpec]:
    """The last layer of the first of two stages is a `layer`; the second turns back."""
    half = layers(LAYERS // 2 - 1)
    return [*half, LayerSpec(layer), *half, LayerSpec(CopiedTurned)]


def tied() -> list[LayerSpec]:
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return [ends[0], *layers(LAYERS - 2), ends[1]]


def plain(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The usual micro-batches, in the dtype that the engine computes in; None: no engine."""
    half = torch.float16 if engine and engine.fp16_enabled() else torch.float32
    dtype = torch.bfloat16 if engine and engine.bfloat16_enabled() else half
    return batches(engine.grid.get_data_parallel_id() if engine else 0, dtype)


def of_lengths(lengths: list[int]):
    """Micro-batches of those lengths, round and round."""

    def data(engine):
        by_length = {length: batches(shape=(length, WIDTH)) for length in lengths}
        return (next(by_length[length]) for length in itertools.cycle(lengths))

    return data


@dataclass(frozen=True)
class Kind:
    title: str
    stages: int = 2
    ranks: int = 0  # as many as stages unless given
    specs: Callable[[], list[LayerSpec]] = lambda: layers(LAYERS)
    stock_specs: Callable[[], list[LayerSpec]] | None = None  # where stock cannot run the same
    stock: bool = True  # whether stock computes the right thing
    config: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    data: Callable[[Any], Iterator[tuple[torch.Tensor, torch.Tensor]]] = plain
    prepare: Callable[[Any], None] | None = None  # called with the engine
    before_batch: Callable[[Any], None] | None = None
    engine_class: type | None = None
    simulated: float | None = (
        0.0  # largest relative difference to the same in one process; None: that cannot be
    )
    possible: Callable[[], bool] = lambda: True  # for this DeepSpeed on this device
    same_packets: int = 1  # neighbouring ranks that have to send the same bytes

    @property
    def world_size(self) -> int:
        return self.ranks or self.stages
