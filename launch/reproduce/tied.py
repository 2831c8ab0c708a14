"""A weight that the first and the last stage have, trained as their pipeline trains its two copies."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_compress.simulate import SimulatedReplicas


class TiedCopies:
    """Exchanges the gradients that both uses of a tied weight have, as the key "tied" of the block says.

    Two stages that sum the gradients of their copies are two replicas whose average counts twice. The weight
    is one part here, not blocks of rows as in a pipeline: `topk` may choose other entries.
    """

    def __init__(self, stages: nn.Sequential, config: dict[str, Any]):
        """
        Args:
            stages: of which the last may have a `Linear` with a weight of the first.
            config: its "ds_compress" block counts.
        """
        self.copies: SimulatedReplicas | None = None
        self._of_head: list[Tensor] = []
        first = {id(parameter) for parameter in stages[0].parameters()}
        heads = [m for m in stages[-1].modules() if isinstance(m, nn.Linear) and id(m.weight) in first]
        exchange = config.get("ds_compress", {}).get("tied")
        if not exchange or not heads:
            return
        (head,) = heads
        self._weight = head.weight
        self.copies = SimulatedReplicas(
            nn.ParameterList([head.weight]), {"ds_compress": {"replicas": exchange}}, 2
        )
        head.forward = functools.partial(_with_own_gradient, head, self._of_head)

    def exchange(self) -> None:
        """Set the gradient of the weight to the sum that both stages get; after the backward passes."""
        if self.copies is None or self._weight.grad is None:
            return
        self.copies.collect()
        self._weight.grad = torch.stack(self._of_head).sum(0)
        self._of_head.clear()
        self.copies.collect()
        self.copies.average()
        self._weight.grad *= 2


class _Copy(torch.autograd.Function):
    """The weight, whose gradient goes into a list instead of being added to that of its other uses."""

    @staticmethod
    def forward(context: Any, weight: Tensor, gradients: list[Tensor]) -> Tensor:
        context.gradients = gradients
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None]:
        context.gradients += gradients
        return None, None


def _with_own_gradient(head: nn.Linear, gradients: list[Tensor], x: Tensor) -> Tensor:
    return F.linear(x, _Copy.apply(head.weight, gradients), head.bias)
