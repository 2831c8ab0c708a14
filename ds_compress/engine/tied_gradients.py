"""Tied weights: stages that have copies of one weight exchange its gradient in packets.

    first stage: embedding    gradient of its use  --+
                                                     +-- Exchange --> their sum, the same on both
    last stage: head          gradient of its use  --+

DeepSpeed all-reduces it in full after the last backward pass of each step: [vocabulary, width], for a small
model far more than all messages of the step. Copies stay equal, as all decode the same packets.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe import schedule
from torch import Tensor
from torch import distributed as dist

from ds_compress.config import KEY, Config
from ds_compress.engine.deepspeed import (
    PipelineEngine,
    is_deepspeeds,
    loss_scale,
    tied_gradient,
    tied_itemsize,
)
from ds_compress.engine.exchanged_gradients import GradientTraffic, describe
from ds_compress.engine.optimizer_mixins import has_autocast_scaler
from ds_compress.engine.stage import Stage
from ds_compress.engine.wiring import connect_sets
from ds_compress.replicas.exchange import Exchange
from ds_compress.replicas.slices import DTYPES, Gradient, is_compressed
from ds_compress.replicas.transfers import Replicas, replica_failures
from ds_compress.transport import staging
from ds_compress.transport.collectives import all_gather
from ds_compress.transport.p2p import ExchangeConnections

logger = logging.getLogger("ds_compress")

BLOCK_BYTES = 32 * 10**6
"""Most bytes of uncompressed gradients in one exchange: while it is under way, the next is encoded."""
CONTENT, BETWEEN = "gradients of tied weights", "stages"


class _RowRange(NamedTuple):
    """Rows of a weight that are exchanged together."""

    weight: Tensor
    start: int  # among its values
    end: int
    width: int  # values of a row


class TiedTraffic(GradientTraffic):
    """Sums the gradients of weights that the same stages have copies of."""

    kind = "tied"

    def __init__(self, engine: PipelineEngine, config: Config, connections: ExchangeConnections):
        """
        Args:
            engine: DeepSpeed's.
            config: with a codec for tied weights.
            connections: of the ranks that have copies.
        """
        assert config.tied_codec is not None
        weights = _weights_of(engine.module, connections.ranks)
        self._blocks = [block for weight in weights for block in _cut(weight)]
        # a stage beyond the last one: all copies agree on it, and gradients between replicas have another
        replicas = Replicas.over(connections, engine.num_stages, content=CONTENT, between=BETWEEN)
        exchange = Exchange(
            replicas,
            config.tied_codec,
            BLOCK_BYTES,
            config.block.seed,
            config.block.link.checksum,
            max(tied_itemsize(engine, weight) for weight in weights),
            widths={number: block.width for number, block in enumerate(self._blocks)},
        )
        super().__init__(engine, config, exchange)
        self._config = config

    @property
    def warmup_steps(self) -> int:
        return self._config.warmup_steps

    @property
    def is_warm(self) -> bool:
        """Return whether the warm-up is over, and recipe "auto" has chosen."""
        return super().is_warm and not self._config.is_open

    def all_reduce(self) -> bool:
        """Replace the gradients of all tied weights by their sums; return False if that is left to
        DeepSpeed."""
        engine = self._engine
        if not self.is_warm:
            return False
        ours = {id(block.weight): block.weight for block in self._blocks}
        for weight, group in engine.module.get_tied_weights_and_groups():
            gradient = tied_gradient(engine, weight)
            if id(weight) not in ours and gradient is not None:
                with replica_failures(self.exchange.replicas):
                    dist.all_reduce(gradient, group=group)
        found, flat = dict[int, Tensor](), dict[int, Tensor]()
        for key, weight in ours.items():
            if not weight.requires_grad:  # no longer
                continue
            gradient = tied_gradient(engine, weight)
            if gradient is None:  # other stages have one
                gradient = weight.grad = torch.zeros_like(weight)
            found[key], flat[key] = gradient, gradient.contiguous().view(-1)
        parts = [
            Gradient(number, flat[id(block.weight)][block.start : block.end])
            for number, block in enumerate(self._blocks)
            if id(block.weight) in flat
        ]
        self.exchange.average(parts, 1.0, loss_scale(engine), engine.global_steps)
        for key, gradient in found.items():
            if flat[key].data_ptr() != gradient.data_ptr():
                gradient.copy_(flat[key].view_as(gradient))
        return True


def reduce_tied_gradients(engine: PipelineEngine) -> None:
    """Run instead of DeepSpeed's all-reduce of the gradients of tied weights."""
    session, profiler = engine.ds_compress, engine.ds_compress.depth.profiler
    if session.tied is None or not session.tied.all_reduce():
        with profiler.timed("tied", 0) if profiler else contextlib.nullcontext():
            session.path.original[schedule.ReduceTiedGrads](engine)


def connect_copies(
    engine: PipelineEngine, stage: Stage, original: Mapping[type, Any]
) -> tuple[TiedTraffic | None, str]:
    """Return what exchanges the gradients of this rank's tied weights, over connections of its own, and what
    the start-up line says of all ranks; None if this rank has none, "" if no rank has. Every rank of the job
    calls it.

    Where it is not possible, they stay exact, and rank 0 logs why. A rank takes part for the first set of
    stages that it shares a weight with: weights that other sets share stay exact.

    Args:
        original: DeepSpeed's functions, by instruction.
    """
    config = stage.config
    if config.tied_codec is None:
        return None, ""
    found = [each["ranks"] for each in engine.module.tied_comms.values()]
    shared = (ranks for ranks in found if len(ranks) > 1 and _weights_of(engine.module, ranks))
    own: list[int] = next(shared, [])
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=engine.device)
    if own:
        mine[own] = 1
    chosen = [tuple(row.nonzero().flatten().tolist()) for row in all_gather(mine)]
    agreed = sorted({ranks for ranks in chosen if ranks and all(chosen[rank] == ranks for rank in ranks)})
    why = _why_exact(engine, original) if agreed else ""
    if not agreed and config.block.recipe is None:  # a recipe may have nothing to do
        why = "no trained weight of 16,384 values or more is on several stages"
    if why and engine.global_rank == 0:
        logger.warning(f"ds_compress: {KEY}.tied has no effect: {why}")
    if why or not agreed:
        return None, ""
    exchanged = f"{CONTENT} between {BETWEEN}"
    connections = connect_sets(stage, engine, agreed, exchanged)
    said = describe(exchanged, config.tied_codec, config.warmup_steps)
    return TiedTraffic(engine, config, connections) if connections.ranks else None, said


def _why_exact(engine: PipelineEngine, original: Mapping[type, Any]) -> str:
    """Return why gradients of tied weights are left to DeepSpeed, "" if they are not; alike on all ranks."""
    if staging.is_needed(engine.device):
        return f"gloo has no all-to-all for memory of a {engine.device.type}"
    if has_autocast_scaler(engine):
        return "torch_autocast to float16 has a loss scale of its own; use bfloat16, or fp16"
    if not is_deepspeeds(original.get(schedule.ReduceTiedGrads)):
        return "the engine has a function of its own for ReduceTiedGrads"
    return ""


def _weights_of(module: Any, ranks: Sequence[int]) -> list[Tensor]:
    """Return the trained weights that `ranks` have copies of and that are large enough, in an order that is
    the same on all of them."""
    return [
        weight
        for weight, group in module.get_tied_weights_and_groups()
        if dist.get_process_group_ranks(group) == sorted(ranks)
        and is_compressed(weight)
        and weight.requires_grad
        and weight.dtype in DTYPES
    ]


def _cut(weight: Tensor) -> list[_RowRange]:
    """Cut a weight into blocks of rows."""
    width = weight[0].numel()
    most = max(1, BLOCK_BYTES // (4 * width)) * width
    return [
        _RowRange(weight, start, min(start + most, weight.numel()), width)
        for start in range(0, weight.numel(), most)
    ]
