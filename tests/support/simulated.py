"""The model of a pipeline in one process, trained as DeepSpeed trains it: equal losses, bit for bit."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_compress.simulate import announce, simulate
from tests.support.pipeline import MICRO_BATCHES, batches, layers, loss_fn

Loss = Callable[[Tensor, Tensor], Tensor]


def even_cuts(count: int, stages: int) -> list[int]:
    """Where DeepSpeed cuts so many layers when all weigh the same."""
    return [count * stage // stages for stage in range(1, stages)]


def simulated(
    specs: Sequence[LayerSpec], config: dict[str, Any], cuts: Sequence[int], **options: Any
) -> nn.Module:
    """The layers with the weights that a pipeline gives them; DeepSpeed seeds layer i with base seed + i."""
    built = []
    for index, spec in enumerate(specs):
        torch.manual_seed(1234 + index)
        built.append(spec.build())
    return simulate(nn.Sequential(*built), config, cuts, **options)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator,
    loss_fn: Loss = loss_fn,
    micro_batches: int = MICRO_BATCHES,
) -> float:
    """The mean loss over the micro-batches of a step."""
    model.train()
    loss = _mean_loss(model, data, loss_fn, micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model: nn.Module, data: Iterator, micro_batches: int = MICRO_BATCHES) -> float:
    """The mean loss over as many micro-batches as a step has."""
    model.eval()
    with torch.no_grad():
        return _mean_loss(model, data, loss_fn, micro_batches)


def train_simulated(stages: int, config: dict[str, Any], steps: int = 4) -> list[float]:
    """The losses of `tests.support.pipeline.train`."""
    specs = layers()
    model = simulated(specs, config, even_cuts(len(specs), stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches()
    return [train_step(model, optimizer, data) for _ in range(steps)]


def _mean_loss(model: nn.Module, data: Iterator, loss_fn: Loss, micro_batches: int) -> float:
    total = torch.tensor(0.0)
    for x, target, *others in itertools.islice(data, micro_batches):
        announce(model, (x, target, *others))
        loss = loss_fn(model(x), target)
        if model.training:
            (loss / micro_batches).backward()
        total += loss.detach()
    return (total / micro_batches).item()
