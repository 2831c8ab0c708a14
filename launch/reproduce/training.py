"""Train simulated models of a task, as a pipeline of DeepSpeed does."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_compress.simulate import SimulatedReplicas, announce
from launch.reproduce.task import Batch, Task
from launch.reproduce.tied import TiedCopies


def train(
    models: Sequence[nn.Sequential],
    config: dict[str, Any],
    task: Task,
    seed: int,
    device: torch.device,
    most: int | None = None,
) -> tuple[list[float], SimulatedReplicas]:
    """Train; return the loss of every step, up to the first that is not finite, and what averaged gradients.

    Args:
        models: one for each replica, which share their parameters.
        config: of the gradients between them.
        most: steps, if fewer than all.
    """
    optimizer = task.optimizer(models[0].parameters())
    schedule = task.schedule(optimizer)
    replicas = SimulatedReplicas(models[0], config, len(models))
    tied = TiedCopies(models[0], config)
    losses = list[float]()
    for model in models:
        model.train()
    for number in range(task.epochs):
        for batch in task.epoch(seed, number):
            parts = zip(*(tensor.chunk(len(models)) for tensor in batch), strict=True)
            found = []
            for model, part in zip(models, parts, strict=True):
                found.append(step(model, task, part, device))
                replicas.collect()
            losses.append(sum(found) / len(found))
            if not math.isfinite(losses[-1]):
                return losses, replicas
            replicas.average()
            tied.exchange()
            clip(models[0], task.gradient_clipping)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if len(losses) == most:
                return losses, replicas
    return losses, replicas


def step(model: nn.Module, task: Task, batch: Batch, device: torch.device) -> float:
    """Compute loss and gradients of one batch."""
    announce(model, batch)
    inputs, labels, _ = (tensor.to(device) for tensor in batch)
    loss = task.loss(model(inputs), labels)
    loss.backward()
    return loss.item()


def clip(model: nn.Sequential, largest: float) -> None:
    """Scale all gradients as a pipeline of DeepSpeed (0.19.8, fp32) does: where the norm of the first stage's
    gradients is over `largest`. Its `clip_grad_norm_` counts parameters of model-parallel rank 0 alone, and
    takes stages for such ranks."""
    if not largest:
        return
    first = [p.grad for p in model[0].parameters() if p.grad is not None]
    norm = torch.stack([grad.norm(2.0) for grad in first]).pow(2.0).sum().pow(0.5)
    coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)
