"""The pair of layers at a cut: one turns hidden states into coefficients, the other turns them back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn


class Basis(NamedTuple):
    """Hold the basis that a pair starts with."""

    mean: Tensor
    """[width] fp32."""
    directions: Tensor
    """[rank, width] fp32, orthonormal rows."""


class PairLayer(nn.Module):
    """Apply a linear map to the last dimension of a tensor, or of the first tensor of a tuple.

    The other tensors of a tuple are passed on. The output has the input's dtype; parameters may have another
    one, as adapters do.
    """

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, inputs: Any) -> Any:
        """Map the first tensor of `inputs`."""
        x, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)
        return (y, *others) if isinstance(inputs, tuple) else y


class Narrow(PairLayer):
    """End a stage: map hidden states [..., width] to coefficients [..., rank]."""

    def __init__(self, basis: Basis):
        super().__init__(basis.directions, -(basis.directions @ basis.mean))


class Widen(PairLayer):
    """Begin a stage: map coefficients [..., rank] to hidden states [..., width]."""

    def __init__(self, basis: Basis):
        super().__init__(basis.directions.T.contiguous(), basis.mean)


def insert_pairs(
    layers: Sequence[Any], cuts: Sequence[int], bases: Sequence[Basis]
) -> tuple[list[Any], list[int]]:
    """Insert the specs of a pair at each cut.

    Args:
        layers: modules, functions and specs, as of a `PipelineModule`.
        cuts: index of the first layer of every stage but the first one.
        bases: of each cut.

    Returns:
        The longer list of layers, and the cuts in it, between the layers of each pair.
    """
    longer: list[Any] = []
    inside = []
    for start, end, basis in zip([0, *cuts], cuts, bases):
        longer += [*layers[start:end], LayerSpec(Narrow, basis)]
        inside.append(len(longer))
        longer.append(LayerSpec(Widen, basis))
    return [*longer, *layers[cuts[-1] if cuts else 0 :]], inside
