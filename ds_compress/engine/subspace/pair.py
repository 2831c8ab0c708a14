"""The pair of layers at a cut: one turns hidden states into few coefficients, the other turns them back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn


class Basis(NamedTuple):
    """Where a pair starts."""

    mean: Tensor
    """[width] fp32."""
    directions: Tensor
    """[rank, width] fp32, orthonormal rows."""


class Linear(nn.Module):
    """Acts on the last dimension of a tensor, or of the first tensor of a tuple; the rest passes by.

    What comes out has the dtype of what went in; the parameters may have another one, as adapters do.
    """

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, inputs: Any) -> Any:
        x, *rest = inputs if isinstance(inputs, tuple) else (inputs,)
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)
        return (y, *rest) if isinstance(inputs, tuple) else y


class Narrow(Linear):
    """The last layer of a stage: hidden states [..., width] -> coefficients [..., rank]."""

    def __init__(self, basis: Basis):
        super().__init__(basis.directions, -(basis.directions @ basis.mean))


class Widen(Linear):
    """The first layer of the next stage: coefficients [..., rank] -> hidden states [..., width]."""

    def __init__(self, basis: Basis):
        super().__init__(basis.directions.T.contiguous(), basis.mean)


def with_pairs(
    layers: Sequence[Any], cuts: Sequence[int], bases: Sequence[Basis]
) -> tuple[list[Any], list[int]]:
    """`layers` with the specs of a pair at each cut, and where the cuts are then: inside the pairs.

    Args:
        cuts: index of the first layer of every stage but the first one.
        bases: of each cut.
    """
    found: list[Any] = []
    inside = []
    for start, end, basis in zip([0, *cuts], cuts, bases):
        found += [*layers[start:end], LayerSpec(Narrow, basis)]
        inside.append(len(found))
        found.append(LayerSpec(Widen, basis))
    return [*found, *layers[cuts[-1] if cuts else 0 :]], inside
