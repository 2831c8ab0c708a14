"""A PipelineModule with a pair of layers at each of its cuts."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor

from ds_compress.engine.subspace.basis import bases
from ds_compress.engine.subspace.pair import Basis, with_pairs
from ds_compress.errors import CompressionError, in_one_line


class SubspacePipeline(PipelineModule):
    """Stages send each other `rank` coefficients in the place of a hidden state, in a basis that is trained
    with the model and begins as the principal components of what the samples are at the cut.

    DeepSpeed decides where the cuts are, as for any `PipelineModule`; tied layers, tuples and activation
    checkpoints are as there. Of a tuple the first tensor is the hidden state, the others cross beside it.
    The layers after a cut have other numbers than without pairs, in files of checkpoints too.
    """

    parts: list[int]
    _layer_specs: list[Any]

    def __init__(
        self, layers: Sequence[Any], *args: Any, rank: int | None, samples: Sequence[Any], **options: Any
    ):
        """
        Args:
            layers, args, options: as of a `PipelineModule`.
            rank: coefficients of a hidden state; None: no pairs, a `PipelineModule` as any other.
            samples: a few inputs of the first layer, tensors or tuples of them; those of rank 0 count. That
                rank runs all layers up to the last cut, one after the other. Specs of layers have to build
                the weights that training starts from: those of a checkpoint, not random ones.

        Raises:
            CompressionError: as of `bases`, on every rank; or the module is also one for DualPipeV.
        """
        if rank is not None and hasattr(self, "activate_phase"):
            raise CompressionError(
                f"subspace: rank {rank}: DualPipeV is not supported, as each of its ranks has two stages; "
                "use a PipelineModule, or rank None, which leaves messages as wide as they are"
            )
        self._rank, self._samples = rank, samples
        super().__init__(layers, *args, **options)

    def _build(self) -> None:
        """Where the cuts are is known here, and nothing has been built."""
        if self._rank is not None and len(self.parts) > 2:
            self._put_pairs(self._rank)
        self._samples = ()
        super()._build()

    def _put_pairs(self, rank: int) -> None:
        if self._grid.get_slice_parallel_world_size() > 1:
            raise CompressionError(
                "subspace: tensor-parallel layers are not supported, as one rank runs all layers"
            )
        cuts = list(self.parts[1:-1])
        found = _same_on_all_ranks(self._layer_specs, cuts, self._samples, rank)
        self._layer_specs, inside = with_pairs(self._layer_specs, cuts, found)
        self._num_layers = len(self._layer_specs)
        self.parts = [0, *inside, self._num_layers]
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])


def _same_on_all_ranks(
    layers: Sequence[Any], cuts: list[int], samples: Sequence[Any], rank: int
) -> list[Basis]:
    """Bases that rank 0 computes: where processors differ, others would find other signs."""
    device = torch.device(get_accelerator().current_device_name())
    found: list[Basis] = []
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = bases(layers, cuts, samples, rank, device)
        except Exception as error:  # the others wait
            failure = error
    known = [basis.directions.shape[1] for basis in found] or [0] * len(cuts)
    widths = _from_rank_0(torch.tensor(known, dtype=torch.int64, device=device)).tolist()
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
        found[number] = Basis(*(_from_rank_0(tensor.to(device)).cpu() for tensor in found[number]))
    return found


def _from_rank_0(tensor: Tensor) -> Tensor:
    dist.broadcast(tensor, 0)
    return tensor
