"""A PipelineModule with a pair of layers at each of its cuts."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor

from ds_compress.engine.subspace.basis import find_bases
from ds_compress.engine.subspace.pair import Basis, insert_pairs
from ds_compress.errors import CompressionError, in_one_line


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
            found.append(
                Basis(
                    torch.empty(width, dtype=torch.float32, device="cpu"),
                    torch.empty(rank, width, dtype=torch.float32, device="cpu"),
                )
            )
        found[number] = Basis(*(_broadcast(tensor.to(device)).cpu() for tensor in found[number]))
    return found


def _broadcast(tensor: Tensor) -> Tensor:
    """Return rank 0's values, in place."""
    dist.broadcast(tensor, 0)
    return tensor
