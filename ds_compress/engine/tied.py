"""Tied weights: stages that have copies of one weight exchange its gradient in packets.

    first stage: embedding    gradient of its use  --+
                                                     +-- Exchange --> their sum, the same on both
    last stage: head          gradient of its use  --+

DeepSpeed all-reduces it in full after the last backward pass of each step: [vocabulary, width], for a small
model far more than all messages of the step. Copies stay equal, as all decode the same packets.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ds_compress.config import Config
from ds_compress.engine.deepspeed import loss_scale, tied_gradient
from ds_compress.engine.traffic import GradientTraffic, describe
from ds_compress.replicas.exchange import Exchange, Replicas
from ds_compress.replicas.slices import DTYPES, Gradient, is_compressed
from ds_compress.transport.collectives import all_gather

BLOCK_BYTES = 32 * 10**6
"""Most bytes of uncompressed gradients in one exchange: while it is under way, the next is encoded."""


CONTENT, BETWEEN = "gradients of tied weights", "stages"


class TiedTraffic(GradientTraffic):
    """Sums the gradients of weights that the same stages have copies of."""

    kind = "tied"

    def __init__(self, engine: Any, config: Config, group: Any, ranks: list[int]):
        """
        Args:
            engine: DeepSpeed's.
            config: with a codec for tied weights.
            group: process group of `ranks`, in which nothing else is sent.
            ranks: that have copies.
        """
        assert config.tied_codec is not None
        self._weights = _weights_of(engine.module, ranks)
        self._blocks = [
            (weight, rows) for weight in self._weights for rows in _blocks(weight.shape[0], weight[0].numel())
        ]
        # all copies draw the same random bits, and no replicas of a stage do
        replicas = Replicas(
            len(ranks),
            dist.get_rank(group),
            group,
            engine.num_stages,
            CONTENT,
            BETWEEN,
        )
        widths = {number: weight[0].numel() for number, (weight, _) in enumerate(self._blocks)}
        exchange = Exchange(
            replicas,
            config.tied_codec,
            BLOCK_BYTES,
            config.block.seed,
            config.block.link.checksum,
            engine.communication_data_type.itemsize,
            widths=widths,
        )
        super().__init__(engine, config, exchange)
        self._config = config

    @property
    def warmup_steps(self) -> int:
        return self._config.warmup_steps

    def all_reduce(self) -> bool:
        """Replace the gradients of all tied weights by their sums; return False if that is left to
        DeepSpeed."""
        engine = self._engine
        if not self.is_warm:
            return False
        gradients, copies = dict[int, Tensor](), list[tuple[Tensor, Tensor]]()
        for weight, group in engine.module.get_tied_weights_and_groups():
            if not weight.requires_grad:
                continue
            gradient = tied_gradient(engine, weight)
            if not any(weight is each for each in self._weights):
                dist.all_reduce(gradient, group=group)
                continue
            flat = gradients[id(weight)] = gradient.contiguous().view(-1)
            if flat.data_ptr() != gradient.data_ptr():
                copies.append((gradient, flat))
        parts = [
            Gradient(number, gradients[id(weight)][rows.start * width : rows.stop * width])
            for number, (weight, rows) in enumerate(self._blocks)
            if id(weight) in gradients
            for width in [weight[0].numel()]
        ]
        self.exchange.average(parts, 1.0, loss_scale(engine), engine.global_steps)
        for gradient, flat in copies:
            gradient.copy_(flat.view_as(gradient))
        return True


def connect_copies(engine: Any, config: Config) -> tuple[TiedTraffic | None, str]:
    """Return what exchanges the gradients of this rank's tied weights, with a process group of its own, and
    what the start-up line says of all ranks; None if this rank has none, "" if no rank has. Every rank of the
    job calls it.

    Weights that other stages share than the first one of this rank stay exact.
    """
    if config.tied_codec is None:
        return None, ""
    found = [shared["ranks"] for shared in engine.module.tied_comms.values()]
    own: list[int] = next(
        (ranks for ranks in found if len(ranks) > 1 and _weights_of(engine.module, ranks)), []
    )
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=engine.device)
    if own:
        mine[own] = 1
    limit, groups = timedelta(seconds=config.block.link.timeout_s), dict[tuple[int, ...], Any]()
    for row in all_gather(mine):
        ranks = tuple(row.nonzero().flatten().tolist())
        if ranks and ranks not in groups:
            groups[ranks] = dist.new_group(ranks, timeout=limit)
    said = describe(f"{CONTENT} between {BETWEEN}", config.tied_codec, config.warmup_steps) if groups else ""
    return TiedTraffic(engine, config, groups[tuple(sorted(own))], own) if own else None, said


def _weights_of(module: Any, ranks: list[int]) -> list[Tensor]:
    """Return the weights that `ranks` have copies of and that are large enough, in an order that is the same
    on all of them."""
    return [
        weight
        for weight, group in module.get_tied_weights_and_groups()
        if dist.get_process_group_ranks(group) == sorted(ranks)
        and is_compressed(weight)
        and weight.dtype in DTYPES
    ]


def _blocks(rows: int, width: int) -> list[range]:
    """Cut the rows of a weight into blocks of one exchange each."""
    most = max(1, BLOCK_BYTES // (4 * width))
    return [range(first, min(first + most, rows)) for first in range(0, rows, most)]
