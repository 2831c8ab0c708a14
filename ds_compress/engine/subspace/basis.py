"""The initial bases of the pairs: principal components of a model's hidden states at its cuts.

The layers run one after the other in this process; of those that specs build, one at a time is in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_compress.engine.subspace.pair import Basis
from ds_compress.errors import CompressionError


def find_bases(
    layers: Sequence[Any], cuts: Sequence[int], samples: Sequence[Any], rank: int, device: torch.device
) -> list[Basis]:
    """Compute mean and principal components of the hidden states at each cut, on the CPU.

    The state of random number generators does not change, nor do modules among `layers`.

    Args:
        layers: modules, functions and specs, as of a `PipelineModule`.
        cuts: index of the first layer after each cut, ascending.
        samples: inputs of the first layer: tensors, or tuples of them.
        rank: number of components.
        device: for layers that specs build; modules run on their own device.

    Raises:
        CompressionError: there are no samples, or what passes a cut is not a finite hidden state of at least
            `rank` values.
    """
    if not samples:
        raise CompressionError("subspace: samples: none are given; should be a few inputs of the first layer")
    states = list(samples)
    found = []
    tied: dict[str, nn.Module] = {}
    devices = [device] if device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        for number, layer in enumerate(layers[: max(cuts, default=0)]):
            with _evaluation_function(layer, tied, device) as (function, on):
                states = [function(_move(state, on)) for state in states]
            if number + 1 in cuts:
                hidden = [state[0] if isinstance(state, tuple) else state for state in states]
                found.append(_principal_components(hidden, rank, f"subspace: the cut after layer {number}"))
    return found


@contextmanager
def _evaluation_function(
    layer: Any, tied: dict[str, nn.Module], device: torch.device
) -> Iterator[tuple[Callable[[Any], Any], torch.device]]:
    """Yield a layer as a function, in evaluation mode, and the device it computes on."""
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build().to(device)
        module = tied[layer.key]
        function = module if layer.forward_fn is None else partial(layer.forward_fn, module)
    elif isinstance(layer, LayerSpec):
        function = module = layer.build()
        if isinstance(module, nn.Module):
            module.to(device)
    else:
        function = module = layer
    modes = [(each, each.training) for each in module.modules()] if isinstance(module, nn.Module) else []
    for each, _ in modes:
        each.training = False
    parameter = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    try:
        yield function, device if parameter is None else parameter.device
    finally:
        for each, mode in modes:
            each.training = mode


def _move(state: Any, device: torch.device) -> Any:
    if isinstance(state, tuple):
        return tuple(_move(each, device) for each in state)
    return state.to(device) if isinstance(state, Tensor) else state


def _principal_components(hidden: list[Tensor], rank: int, where: str) -> Basis:
    """Compute them for the last dimension of all tensors together; `where` begins errors."""
    first = hidden[0]
    if not first.is_floating_point() or first.ndim < 2:
        raise CompressionError(
            f"{where}: a {first.dtype} tensor of shape {list(first.shape)} passes it first; should be hidden "
            "states [..., width]"
        )
    width = first.shape[-1]
    if not 1 <= rank <= width:
        raise CompressionError(
            f"{where}: rank {rank}; hidden states are {width} wide there: should be 1..{width}"
        )
    rows = torch.cat([each.reshape(-1, width) for each in hidden]).double()
    mean = rows.mean(0)
    rows -= mean
    moment = rows.T @ rows
    if not torch.isfinite(moment).all():
        raise CompressionError(f"{where}: hidden states of the samples hold inf or nan")
    directions = torch.linalg.eigh(moment).eigenvectors.flip(-1)[:, :rank].T
    return Basis(mean.float().cpu(), directions.float().contiguous().cpu())
