"""Define what an experiment provides: model, data, optimizer, metric."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

STAGES = 4

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, labels, and the index of each sample in the training set, int64 [samples]."""


class Task(Protocol):
    """An experiment of one preset's size; everything follows from a seed."""

    metric: str  # what `evaluate` measures first
    epochs: int
    steps_per_epoch: int
    gradient_clipping: float  # 0: none

    def prepare(self) -> None:
        """Make what all runs start from."""

    def stages(self, seed: int) -> list[nn.Module]:
        """Build the model in four stages."""

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the CPU, shuffled; drop an incomplete last batch."""

    def loss(self, output: Tensor, labels: Tensor) -> Tensor: ...

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer: ...

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the schedule, to be stepped after every optimizer step."""

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return the metrics on held-out data, by name."""


def existing(path: Path, what: str) -> Path:
    """Return `path`, or exit with a message if it does not exist."""
    if not path.exists():
        raise SystemExit(f"reproduce: {path}: no {what} there; --data names the folder that has it")
    return path


def weights_file(path: Path, pretrain: Callable[[], nn.Module]) -> Path:
    """Return `path`, where the weights of a pretrained model are kept; make them first if there are none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file(pretrain().state_dict(), part)
        part.rename(path)
    return path


def generator(*numbers: int) -> torch.Generator:
    """Return a generator seeded by `numbers`."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)
