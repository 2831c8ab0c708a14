"""Master weights of a rank: what its optimizer steps on, in fp32.

These are parameters, or the partition of a DeepSpeed optimizer; those that are compressed come first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.config import Config
from ds_compress.engine.deepspeed import has_partitions, partitioned_weights, tied_weights
from ds_compress.message.part import Engine
from ds_compress.replicas.slices import RowSpan, is_compressed
from ds_compress.sites.outer_step import EXACT, MIN_DELTA_NUMEL, DeltaCodec, DeltaPart

TIED = 2**15
"""Numbers of parts of tied parameters begin here; they are equal on all stages."""


class MasterWeight(NamedTuple):
    """Where the fp32 values of a parameter lie."""

    values: Tensor  # a view
    part: DeltaPart | None  # None: it stays exact


def find_masters(engine: Engine, trained: Sequence[Tensor]) -> list[MasterWeight]:
    """Return the fp32 values of this rank's `trained` parameters."""
    optimizer, module, ranks = engine.optimizer, engine.module, engine.grid.get_data_parallel_world_size()
    # equal for all copies of a tied parameter, which are on several stages
    tied = {id(p): (TIED + 64 * key + position) % EXACT for key, position, p in tied_weights(module)}
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())} | tied
    if has_partitions(optimizer):
        places = partitioned_weights(optimizer, engine.grid.get_data_parallel_id(), ranks)
    else:
        places = ((p, 0, p.detach().view(-1)) for p in trained)
    # partitions cut tied copies in different places, so their groups would differ
    cut = tied if ranks > 1 else {}
    found = [
        MasterWeight(values, None) if id(p) in cut else master_weight(p, numbers[id(p)], values, start)
        for p, start, values in places
    ]
    return sorted(found, key=lambda each: each.part is None)


def master_weight(parameter: Tensor, number: int, values: Tensor, start: int = 0) -> MasterWeight:
    """Return the master weight of a parameter, whose `values` of this rank begin at `start`."""
    if not is_compressed(parameter, MIN_DELTA_NUMEL):
        return MasterWeight(values, None)
    rows = RowSpan.of(parameter[0].numel(), start, values.numel())
    return MasterWeight(values, DeltaPart(number, values.numel(), rows))


def build_delta_codec(config: Config, masters: Sequence[MasterWeight]) -> DeltaCodec:
    """Return what encodes deltas of `masters`, for a replica that is launched apart; see `DeltaCodec`."""
    assert config.outer_codec is not None
    parts = [each.part for each in masters if each.part is not None]
    exact = sum(each.values.numel() for each in masters if each.part is None)
    return DeltaCodec(config.outer_codec, parts, exact, config.block.seed)


def read_masters(masters: Sequence[MasterWeight]) -> Tensor:
    """Return a copy of the values, 1-D, in host memory."""
    found = [each.values.reshape(-1).cpu() for each in masters]
    return torch.cat(found or [torch.empty(0, dtype=torch.float32, device="cpu")])


def write_masters(masters: Sequence[MasterWeight], values: Tensor) -> None:
    """Let master weights have `values`, as `read_masters` returns them."""
    for each, own in zip(masters, values.split([each.values.numel() for each in masters])):
        each.values.copy_(own.view_as(each.values))
