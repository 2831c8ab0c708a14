"""What both experiments have in common for whoever runs them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

STAGES = 4

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, labels, and the index of each sample in the training set, int64 [samples]."""


class Task(Protocol):
    """An experiment of a preset's size: model, data, optimizer, measure; all of it follows from a seed."""

    name: str
    metric: str  # what `evaluate` measures first
    epochs: int
    steps_per_epoch: int
    gradient_clipping: float  # 0: none

    def stages(self, seed: int) -> list[nn.Module]:
        """The model of a run, cut in four."""

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        """The batches of an epoch, on the CPU, shuffled; samples that fill no batch are left out."""

    def loss(self, output: Tensor, labels: Tensor) -> Tensor: ...

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer: ...

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Stepped after every optimizer step."""

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """What the model is worth on held-out data, by measure."""


def existing(path: Path, what: str) -> Path:
    """`path`, or the end of the program where nothing is there."""
    if not path.exists():
        raise SystemExit(f"reproduce: {path}: no {what} there; --data names the folder that has it")
    return path


def generator(*numbers: int) -> torch.Generator:
    """A generator of its own for every choice of `numbers`."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)
