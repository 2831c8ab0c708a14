"""Master weights of a rank: what its optimizer steps on, in fp32.

These are parameters, or the partition of a DeepSpeed optimizer.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_compress.engine.deepspeed import (
    copy_weights_to_parameters,
    has_partitions,
    partitioned_weights,
    tied_weights,
)
from ds_compress.replicas.slices import RowSpan, is_compressed
from ds_compress.sites.outer_step import EXACT, MIN_DELTA_NUMEL, DeltaPart

TIED = 2**15
"""Numbers of parts of tied parameters begin here; they are equal on all stages."""


class MasterWeight(NamedTuple):
    """Where the fp32 values of a parameter lie."""

    values: Tensor  # 1-D view
    part: DeltaPart | None  # None: it stays exact


def find_masters(engine: Any, trained: list[Tensor]) -> list[MasterWeight]:
    """Return the fp32 values of this rank's `trained` parameters, those that are compressed first."""
    optimizer, module = engine.optimizer, engine.module
    ranks = engine.grid.get_data_parallel_world_size()
    tied = _tied_numbers(module)
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())} | tied

    def master(parameter: Tensor, start: int, values: Tensor) -> MasterWeight:
        # partitions cut tied copies in different places, so their groups would differ
        is_cut = id(parameter) in tied and ranks > 1
        if is_cut or not is_compressed(parameter, MIN_DELTA_NUMEL):
            return MasterWeight(values, None)
        rows = RowSpan.of(parameter[0].numel(), start, values.numel())
        return MasterWeight(values, DeltaPart(numbers[id(parameter)], values.numel(), rows))

    if has_partitions(optimizer):
        own = engine.grid.get_data_parallel_id()
        found = [master(*place) for place in partitioned_weights(optimizer, own, ranks)]
    else:
        found = [master(p, 0, p.detach().view(-1)) for p in trained]
    return sorted(found, key=lambda each: each.part is None)


def _tied_numbers(module: Any) -> dict[int, int]:
    """Return a number for each tied parameter of this stage, by id; the same for all its copies."""
    return {
        id(weight): (TIED + 64 * key + position) % EXACT for key, position, weight in tied_weights(module)
    }


def read_masters(masters: list[MasterWeight]) -> Tensor:
    """Return a copy of the values in host memory."""
    return torch.cat(
        [each.values.cpu() for each in masters] or [torch.empty(0, dtype=torch.float32, device="cpu")]
    )


def write_masters(engine: Any, masters: list[MasterWeight], values: Tensor) -> None:
    with torch.no_grad():
        for each, own in zip(masters, values.split([each.values.numel() for each in masters])):
            each.values.copy_(own)
        copy_weights_to_parameters(engine.optimizer)
