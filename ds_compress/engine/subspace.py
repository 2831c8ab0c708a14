"""A pipeline with a pair of small layers at every cut: stages send coefficients in a learned basis.

The basis starts as the principal components of the model's hidden states at the cut. To find it, the layers
run one after the other in the process of rank 0; of those that specs build, one at a time is in memory.
Experimental; docs/subspace.md says what it costs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from ds_compress.errors import CompressionError, in_one_line

__all__ = ["Basis", "Narrow", "PairLayer", "SubspacePipeline", "Widen", "find_bases", "insert_pairs"]


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


class SubspacePipeline(PipelineModule):
    """Send `rank` coefficients instead of each hidden state, in a basis that is trained with the model.

    The basis starts as the principal components of the samples' hidden states at the cut. DeepSpeed decides
    where the cuts are, and tied layers, tuples and activation checkpointing work as in any `PipelineModule`.
    Of a tuple the first tensor is the hidden state, the others are sent beside it. Layers after a cut have
    other numbers than without pairs, in files of checkpoints too.
    """

    parts: list[int]
    _layer_specs: list[Any]

    def __init__(
        self, layers: Sequence[Any], *args: Any, rank: int | None, samples: Sequence[Any], **options: Any
    ):
        """
        Args:
            layers, args, options: as of a `PipelineModule`.
            rank: coefficients of a hidden state; None: no pairs.
            samples: a few inputs of the first layer, tensors or tuples of them. Rank 0 runs all layers up to
                the last cut on its samples. Specs must build the weights that training starts from: those of
                a checkpoint, not random ones.

        Raises:
            CompressionError: on every rank, for what `find_bases` refuses; or the module is also one for
                DualPipeV.
        """
        if rank is not None and hasattr(self, "activate_phase"):
            raise CompressionError(
                f"subspace: rank {rank}: DualPipeV is not supported, as each of its ranks has two stages; "
                "use a PipelineModule, or rank None, which does not change messages"
            )
        self._rank, self._samples = rank, samples
        super().__init__(layers, *args, **options)

    def _build(self) -> None:
        """Insert the pairs: DeepSpeed has decided where the cuts are, and has built nothing yet."""
        if self._rank is not None and len(self.parts) > 2:
            self._insert_pairs(self._rank)
        self._samples = ()
        super()._build()

    def _insert_pairs(self, rank: int) -> None:
        if self._grid.get_slice_parallel_world_size() > 1:
            raise CompressionError(
                "subspace: tensor-parallel layers are not supported, as one rank runs all layers"
            )
        cuts = list(self.parts[1:-1])
        found = _find_bases_on_rank_0(self._layer_specs, cuts, self._samples, rank)
        self._layer_specs, inside = insert_pairs(self._layer_specs, cuts, found)
        self._num_layers = len(self._layer_specs)
        self.parts = [0, *inside, self._num_layers]
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])


def _find_bases_on_rank_0(
    layers: Sequence[Any], cuts: list[int], samples: Sequence[Any], rank: int
) -> list[Basis]:
    """Compute the bases on rank 0 and send them to all: other processors could find other signs."""
    device = torch.device(get_accelerator().current_device_name())
    found: list[Basis] = []
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = find_bases(layers, cuts, samples, rank, device)
        except Exception as error:  # raised below: the others wait for a verdict
            failure = error
    known = [basis.directions.shape[1] for basis in found] or [0] * len(cuts)
    widths = _broadcast(torch.tensor(known, dtype=torch.int64, device=device)).tolist()
    if not all(widths):
        if isinstance(failure, CompressionError):
            raise failure
        raise CompressionError(
            f"subspace: rank 0 found no basis: {in_one_line(failure) if failure else 'it says why'}"
        ) from failure
    for number, width in enumerate(widths):
        if dist.get_rank():
            sizes = (width,), (rank, width)
            found.append(Basis(*(torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes)))
        found[number] = Basis(*(_broadcast(tensor.to(device)).cpu() for tensor in found[number]))
    return found


def _broadcast(tensor: Tensor) -> Tensor:
    """Return rank 0's values, in place."""
    dist.broadcast(tensor, 0)
    return tensor
